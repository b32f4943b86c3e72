"""Lists on a command line may have commas or blanks."""

from __future__ import annotations

import pytest

from kvstore_console.command_line import ListAction, Parser, WrongUsage, some_of, words


@pytest.mark.parametrize("given", [["1", "4", "16"], ["1,4,16"], ["1,", "4", ",16"], ["1 4 16"]])
def test_both_are_the_same(given: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--concurrency", action=ListAction, of=int)
    assert parser.parse_args(["--concurrency", *given]).concurrency == [1, 4, 16]
    assert words(" ".join(given)) == ["1", "4", "16"]


@pytest.mark.parametrize("given", [["1,x"], [","]])
def test_what_is_no_list_is_said(given: list[str]) -> None:
    parser = Parser()
    parser.add_argument("--concurrency", action=ListAction, of=int)
    with pytest.raises(WrongUsage, match="argument --concurrency"):
        parser.parse_args(["--concurrency", *given])


def test_names_too() -> None:
    assert some_of("--policy", "lru best", ("lru", "best")) == ("lru", "best")
