"""Lists on a command line may have commas or blanks."""

from __future__ import annotations

import argparse

import pytest

from kvstore_engine.cli.lists import ListAction
from kvstored.cli.choices import some_of, words


@pytest.mark.parametrize("given", [["1", "4", "16"], ["1,4,16"], ["1,", "4", ",16"], ["1 4 16"]])
def test_both_are_the_same(given: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", action=ListAction, of=int)
    assert parser.parse_args(["--concurrency", *given]).concurrency == [1, 4, 16]
    assert words(" ".join(given)) == ["1", "4", "16"]


@pytest.mark.parametrize("given", [["1,x"], [","]])
def test_what_is_no_list_is_said(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", action=ListAction, of=int)
    with pytest.raises(SystemExit):
        parser.parse_args(["--concurrency", *given])
    assert "argument --concurrency" in capsys.readouterr().err


def test_names_too() -> None:
    assert some_of("--policy", "lru best", ("lru", "best")) == ("lru", "best")
