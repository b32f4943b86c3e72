"""The audit lines for clients' deletions: one line for each user and second, however many calls there are.

A client may delete often, so its calls are summed up: the log stays readable, and other lines are not crowded out. The
caller is the kernel's: uid and pid of the session's connection. Unary calls have none.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from kvstore_console.printable import printable
from kvstore_console.units import human_blocks
from kvstored.clock import NS_PER_S, Clock
from kvstored.telemetry.flows import Caller

log = logging.getLogger("kvstored.audit")
INTERVAL_NS = NS_PER_S


@dataclass(slots=True)
class _Sum:
    calls: int
    blocks: int
    nbytes: int
    last: str


class DeletionLog:
    """A log of clients' deletions, one line for each user and second. Call `note` for each call that deleted blocks,
    and `tick` from a timer a few times a second; `close` writes the rest.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sums: dict[tuple[str, int], _Sum] = {}
        self._since_ns = 0

    def note(self, session: Caller, blocks: int, nbytes: int) -> None:
        """Note that the client of `session` deleted `blocks` blocks of `nbytes` payload bytes."""
        if not self._sums:
            self._since_ns = self._clock.monotonic_ns()
        found = self._sums.setdefault((session.tenant.name, session.peer.uid), _Sum(0, 0, 0, ""))
        found.calls += 1
        found.blocks += blocks
        found.nbytes += nbytes
        found.last = session.client_name + (f" (pid {session.peer.pid})" if session.peer.pid else "")

    def tick(self) -> None:
        if self._sums and self._clock.monotonic_ns() - self._since_ns >= INTERVAL_NS:
            self.close()

    def close(self) -> None:
        for (tenant, uid), found in self._sums.items():
            who = f"by uid {uid}, " if uid >= 0 else "by unary call, "
            calls, last = ("1 call", "") if found.calls == 1 else (f"{found.calls} calls", "last ")
            amount = human_blocks(found.blocks, found.nbytes)
            log.info("delete of %s: %s in %s, %s%s%s", tenant, amount, calls, who, last, printable(found.last))
        self._sums.clear()
