"""What transfers of the GPU tier have in common: threads that begin them and threads that end them, and the bounce
buffer between this process and the worker.

Owns the threads, the buffer and the count of transfers under way. `begin` jobs wait for room in the bounce buffer, so
they are not on the threads that give it back. Invariant: each transfer is counted and delivered once.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore_tiers.base import Completion, Outcome
from kvstore_tiers.gpu.bounce import Bounce
from kvstore_tiers.threads import ResidentThreads
from kvstore_tiers.under_way import UnderWay


class Steps:
    """`threads` that begin transfers and as many that end them; their names start with `name`."""

    def __init__(self, bounce_bytes: int, threads: int, name: str) -> None:
        self.bounce = Bounce(bounce_bytes)
        self._beginnings = ResidentThreads(f"{name}-start", threads)
        self._ends = ResidentThreads(f"{name}-end", threads)
        self._under_way = UnderWay()

    def expect(self, counted: Callable[[Outcome], Outcome], done: Completion) -> Completion:
        """A transfer begins: what is to be called at its end in place of `done`, which gets what `counted` returns."""
        return self._under_way.begin(lambda outcome: done(counted(outcome)))

    def begin(self, job: Callable[[], None], end: Completion) -> None:
        """Run `job`, which ends the transfer by itself unless it raises."""
        self._beginnings.begin(job, end)

    def finish(self, job: Callable[[], None]) -> bool:
        """Run `job`, which must not raise. False after `close`: not while a transfer has not ended."""
        return self._ends.post(job)

    def close(self) -> None:
        """Finish what is under way, then end the threads. The buffer is the link's too, and closed after it."""
        self._beginnings.close()
        self._under_way.wait()
        self._ends.close()
