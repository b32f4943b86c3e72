"""Time as an argument: the manual clock moves only when advanced, the system's goes on."""

import pytest

from kvstored.clock import NS_PER_S, ManualClock, SystemClock


def test_manual_clock_moves_only_when_advanced() -> None:
    clock = ManualClock(monotonic_ns=5, wall_ns=100)
    assert (clock.monotonic_ns(), clock.wall_ns()) == (5, 100)
    assert clock.advance(s=1.5, ns=2) == 5 + 1_500_000_002
    assert clock.wall_ns() - 100 == 1_500_000_002
    with pytest.raises(RuntimeError, match="moved back"):
        clock.set_ns(4)


def test_system_clock_grows_and_knows_the_epoch() -> None:
    clock = SystemClock()
    assert clock.monotonic_ns() <= clock.monotonic_ns()
    assert clock.wall_ns() > 1_600_000_000 * NS_PER_S
