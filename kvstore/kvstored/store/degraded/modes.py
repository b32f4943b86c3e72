"""The degraded parts of the daemon, each with its time and reason.

The module owns the messages: one log line and one count a transition, however often the cause repeats. It decides
nothing; the breaker and the memory watch do. docs/degraded.md lists every mode with its effects.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvstored.clock import NS_PER_S, Clock
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)


class Mode(Enum):
    """The kind of work that a tier does at present. The values are the states that `kvctl tiers` shows."""

    OK = "ok"
    FULL = "full"  # the medium has no room: what is there is read and overwritten, nothing grows
    SLOW = "slow"  # a transfer hangs: nothing new is asked of it
    READ_ONLY = "read-only"  # writes fail: nothing is written, reads go on
    FAILED = "failed"  # reads fail: it is left out of lookups, as if it held nothing
    SHRUNK = "shrunk"  # the host tier under memory pressure: less than its capacity


# Modes in which a tier does only part of its work, and gRPC health says NOT_SERVING for it.
SHEDDING = frozenset({Mode.SLOW, Mode.READ_ONLY, Mode.FAILED})


class Degradation(NamedTuple):
    """A part of the daemon that does not do all of its work, with its mode, the reason, and the monotonic time since
    when.
    """

    part: str
    mode: Mode
    reason: str
    since_ns: int


class DegradedModes:
    """A record of the modes of all parts of the daemon that can fail. The functions in `on_change` are called at once
    with the name of a part whose mode has changed."""

    def __init__(self, clock: Clock, counters: Counters) -> None:
        self._clock = clock
        self._counters = counters
        self._now: dict[str, Degradation] = {}
        self.on_change: list[Callable[[str], None]] = []

    def mode(self, part: str) -> Mode:
        found = self._now.get(part)
        return found.mode if found is not None else Mode.OK

    def all(self) -> list[Degradation]:
        return list(self._now.values())

    def sentences(self) -> list[str]:
        """Return one line for each part that is not OK, for `kvctl status`."""
        now_ns = self._clock.monotonic_ns()
        return [
            f"{item.part} is {item.mode.value} for {(now_ns - item.since_ns) / NS_PER_S:.0f} s: {item.reason}"
            for item in self._now.values()
        ]

    def enter(self, part: str, mode: Mode, reason: str) -> None:
        """Set the mode of `part`, and log and count it. If the mode does not change, do nothing."""
        before = self.mode(part)
        if before is mode:
            return
        if mode is Mode.OK:
            item = self._now.pop(part)
            self._counters.add("degraded_recoveries")
            seconds = (self._clock.monotonic_ns() - item.since_ns) / NS_PER_S
            log.warning("%s is ok again, after %.0f s as %s", part, seconds, before.value)
        else:
            self._now[part] = Degradation(part, mode, reason, self._clock.monotonic_ns())
            self._counters.add("degraded_transitions")
            log.error("%s is %s: %s", part, mode.value, reason)
        for listener in self.on_change:
            listener(part)
