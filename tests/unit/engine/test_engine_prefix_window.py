"""A step's sequences share a prefix, and a device is asked for windows of the L2 cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.errors import UsageError
from kvstore_engine.kernels.cuda.device import CacheWindow
from kvstore_engine.torch_executor.prefix_window import VARIABLE, PrefixWindow, most_shared
from tests.reference.cache_windows import BLOCK, AskedDevice


def _tables(*tables: Sequence[int]) -> list[npt.NDArray[np.int32]]:
    return [np.array(table, np.int32) for table in tables]


@pytest.mark.parametrize(
    ("tables", "shared"),
    [
        ([], []),
        ([[1, 2, 3]], []),
        ([[1, 2, 3], [4, 2, 3]], []),
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[1, 2, 3], [5], [1, 2, 4], [1, 6]], [1, 2]),  # two blocks once, or one block twice: the first found
        ([[1, 2], [1, 2], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], [1, 2]),
        ([[1], [1], [9, 8, 7, 6, 5, 4], [9, 8, 7, 6, 5, 3]], [9, 8, 7, 6, 5]),
        ([[], [1], [1]], [1]),
    ],
)
def test_the_prefix_that_saves_most_reads(tables: list[list[int]], shared: list[int]) -> None:
    assert most_shared(_tables(*tables)).tolist() == shared


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=8))
def test_no_other_prefix_saves_more(tables: list[list[int]]) -> None:
    def saved(prefix: list[int]) -> int:
        return len(prefix) * (sum(table[: len(prefix)] == prefix for table in tables) - 1)

    found = most_shared(_tables(*tables)).tolist()
    best = max((saved(table[:length]) for table in tables for length in range(1, len(table) + 1)), default=0)
    assert (saved(found) if found else 0) == best


def test_a_window_is_placed_in_every_plane_and_taken_away_when_nothing_is_shared() -> None:
    device = AskedDevice()
    window = PrefixWindow(device, BLOCK)
    window.place(1 << 20, 7)
    assert device.asked == [], "a stream without a window needs none to be taken away"
    first = window.choose(_tables([3, 4, 5, 9], [3, 4, 5, 8]))
    window.place(1 << 20, 7)
    window.place(1 << 21, 7)
    assert first == window.choose(_tables([3, 4, 5], [3, 4, 5, 9, 1])) != window.choose(_tables([6, 4], [6, 4]))
    assert window.choose(_tables([3, 4], [5, 6])) is None
    window.place(1 << 20, 9)
    window.place(1 << 20, 7)
    window.place(1 << 20, 7)
    spans = [(1 << 20) + 3 * BLOCK, (1 << 21) + 3 * BLOCK]
    assert device.asked == [*((CacheWindow(at, 3 * BLOCK), 7) for at in spans), (None, 7)]


def test_it_is_off_unless_it_is_set_and_where_the_device_has_no_windows(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = AskedDevice()
    for text in ("", "0"):
        monkeypatch.setenv(VARIABLE, text)
        assert PrefixWindow.wanted(device, BLOCK) is None
    monkeypatch.setenv(VARIABLE, "1 potato")
    with pytest.raises(UsageError, match=f"{VARIABLE}: .*potato"):
        PrefixWindow.wanted(device, BLOCK)
    monkeypatch.setenv(VARIABLE, "8KiB")
    assert not device.kept and not caplog.records
    assert PrefixWindow.wanted(AskedDevice(window_bytes=0), BLOCK) is None
    assert "has no effect" in caplog.text
    assert PrefixWindow.wanted(device, BLOCK) is not None and device.kept == [8192]
