"""The daemon's priority: set where it may be, and where no service manager has set it."""

from __future__ import annotations

import os

import pytest

from kvstored.config import ConfigError, load_config
from kvstored.process import set_priority


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    state = {"nice": 0, "least": -20}

    def setpriority(which: int, who: int, nice: int) -> None:
        if nice < state["least"]:
            raise PermissionError
        state["nice"] = nice

    monkeypatch.setattr(os, "getpriority", lambda which, who: state["nice"])
    monkeypatch.setattr(os, "setpriority", setpriority)
    return state


def test_it_is_set_where_it_may_be(kernel: dict[str, int]) -> None:
    set_priority(-5)
    assert kernel["nice"] == -5


def test_a_service_managers_word_stands(kernel: dict[str, int]) -> None:
    kernel["nice"] = 3
    set_priority(-5)
    assert kernel["nice"] == 3


def test_without_the_right_it_is_left_alone(kernel: dict[str, int]) -> None:
    kernel["least"] = 0
    set_priority(-5)
    assert kernel["nice"] == 0


def test_a_value_that_no_kernel_knows_is_refused() -> None:
    assert load_config(None, []).daemon.nice == -5
    with pytest.raises(ConfigError, match=r"daemon\.nice must be from -20 to 19, got -21"):
        load_config(None, ["daemon.nice=-21"])
