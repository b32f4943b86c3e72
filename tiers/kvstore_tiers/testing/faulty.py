"""A tier around an inner tier. It fails, waits, damages or stays silent by plan, so that tests can see a medium go bad.

Owns the plan and nothing else; the books are the inner tier's. Without faults it behaves as the inner tier (the
conformance suite runs on it in that state). Never used outside tests and drills. Invariant: a transfer that the plan
does not name ends as the inner tier ends it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import (
    Column,
    Completion,
    ContainerReport,
    FileImage,
    Load,
    Outcome,
    OutcomeKind,
    Segment,
    Slot,
    Tier,
    TierStatistics,
)
from kvstore_tiers.recovered import RecoveredBlocks

Operation = Literal["allocate", "write", "read", "relocate", "sync", "probe"]
Action = Literal["fail", "delay", "corrupt", "hang", "refuse"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a `FaultyTier`: the `action` that spoils the uses of `operation` from number `at` to number `until`,
    counted from 1. With `until` 0 it never ends.

    `fail`: the operation ends as FAILED with `errno`, and the inner tier does nothing. `delay`: its end is reported
    `delay_s` seconds later. `corrupt`: it ends as CORRUPT, also if the inner tier succeeds. `hang`: it ends at
    `let_go`, as FAILED, or at `close`, as CANCELLED. `refuse`: `allocate` finds no room. The operation "write" includes
    `move_in` and `loader`, "read" includes `move_out` and `lend`.
    """

    operation: Operation
    action: Action
    at: int = 1
    until: int = 0
    errno: int = errno.EIO
    delay_s: float = 0.0


def gone(number: int = errno.EIO) -> tuple[Fault, ...]:
    """Return the faults of a device on which every operation fails with the error `number`."""
    return tuple(Fault(operation, "fail", errno=number) for operation in ("write", "read", "relocate", "sync", "probe"))


def hung() -> tuple[Fault, ...]:
    """Return the faults of a device on which no operation ever ends."""
    return tuple(Fault(operation, "hang") for operation in ("write", "read", "relocate", "sync", "probe"))


class FaultyTier(Tier):
    """A tier for tests that passes every operation to the tier `inner`, except for the operations that `faults`
    spoil.
    """

    def __init__(self, inner: Tier, faults: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.info = inner.info
        self._lock = threading.Lock()
        self._faults = tuple(faults)
        self._uses: dict[Operation, int] = {}
        self._hanging: list[Completion] = []
        self._timers: list[threading.Timer] = []

    def plan(self, *faults: Fault) -> None:
        """Replace the planned faults by `faults`, and count the uses of each operation from 1 again."""
        with self._lock:
            self._faults = faults
            self._uses.clear()

    def let_go(self) -> None:
        """End all hanging operations as FAILED, like a device that was reset."""
        with self._lock:
            hanging, self._hanging = self._hanging, []
        for done in hanging:
            done(Outcome(OutcomeKind.FAILED, message="timed out (planned)", errno=errno.ETIMEDOUT))

    @property
    def keeps_recovered(self) -> bool:
        return self.inner.keeps_recovered

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        fault = self._next("allocate")
        return None if fault and fault.action == "refuse" else self.inner.allocate(nbytes, owner)

    def free(self, slot: Slot) -> None:
        self.inner.free(slot)

    def makes_room(self, container: int, nbytes: int, owner: str = "") -> bool:
        return self.inner.makes_room(container, nbytes, owner)

    def containers(self) -> list[ContainerReport]:
        return self.inner.containers()

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        return self.inner.convertible(nbytes, owner)

    def set_aside(self, container: int) -> None:
        self.inner.set_aside(container)

    def put_back(self, container: int) -> bool:
        return self.inner.put_back(container)

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        if passed := self._apply("write", done):
            self.inner.write(slot, header, segments, passed)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        if passed := self._apply("read", done):
            self.inner.read(slot, expect_key, segments, passed)

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        if passed := self._apply("write", done):
            self.inner.move_in(slot, source, expect_key, passed)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        if passed := self._apply("read", done):
            self.inner.move_out(slot, destination, expect_key, passed)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        if passed := self._apply("read", done):
            self.inner.lend(slot, load, passed)

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        inner = self.inner.loader(slot, expect_key)

        def load(image: FileImage, done: Completion) -> None:
            if passed := self._apply("write", done):
                inner(image, passed)
            else:
                os.close(image.descriptor)

        return load

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        if passed := self._apply("relocate", done):
            self.inner.relocate(source, target, expect_key, passed)

    def sync(self, done: Completion) -> None:
        if passed := self._apply("sync", done):
            self.inner.sync(passed)

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        """Check that the inner tier works. Planned faults spoil only a `thorough` check."""
        if passed := self._apply("probe", done) if thorough else done:
            self.inner.probe(passed, thorough=thorough)

    def location(self, slot: Slot) -> str:
        return self.inner.location(slot)

    def quarantine(self, slot: Slot, reason: str) -> None:
        self.inner.quarantine(slot, reason)

    def quarantined(self) -> dict[Slot, str]:
        return self.inner.quarantined()

    def describe_quarantined(self, slot: Slot) -> BlockHeader | None:
        return self.inner.describe_quarantined(slot)

    def publish_again(self, slot: Slot, header: BlockHeader) -> None:
        self.inner.publish_again(slot, header)

    def check_books(self) -> list[str]:
        return self.inner.check_books()

    def check_held(self, containers: Column, offsets: Column, generations: Column) -> list[str]:
        return self.inner.check_held(containers, offsets, generations)

    def recover(self) -> Iterator[tuple[Slot, BlockHeader]]:
        return self.inner.recover()

    def recover_columns(self) -> RecoveredBlocks:
        return self.inner.recover_columns()

    def statistics(self) -> TierStatistics:
        return self.inner.statistics()

    def close(self) -> None:
        for timer in self._timers:
            timer.join()
        with self._lock:
            hanging, self._hanging = self._hanging, []
        for done in hanging:
            done(Outcome(OutcomeKind.CANCELLED, message="the tier was closed on a hanging transfer"))
        self.inner.close()

    def _next(self, operation: Operation) -> Fault | None:
        with self._lock:
            use = self._uses.get(operation, 0) + 1
            self._uses[operation] = use
            for fault in self._faults:
                if fault.operation == operation and fault.at <= use and (not fault.until or use <= fault.until):
                    return fault
        return None

    def _apply(self, operation: Operation, done: Completion) -> Completion | None:
        """Return the completion to pass to the inner tier; None when the inner tier must not be asked."""
        fault = self._next(operation)
        if fault is None or fault.action == "refuse":
            return done
        if fault.action == "fail":
            message = f"{os.strerror(fault.errno)} (planned)"
            self._later(0.0, done, Outcome(OutcomeKind.FAILED, message=message, errno=fault.errno))
            return None
        if fault.action == "hang":
            with self._lock:
                self._hanging.append(done)
            return None
        if fault.action == "corrupt":
            return lambda _outcome: done(Outcome(OutcomeKind.CORRUPT, message="damaged (planned)"))
        return lambda outcome: self._later(fault.delay_s, done, outcome)

    def _later(self, delay_s: float, done: Completion, outcome: Outcome) -> None:
        timer = threading.Timer(delay_s, done, (outcome,))
        timer.daemon = True
        self._timers = [other for other in self._timers if other.is_alive()]
        self._timers.append(timer)
        timer.start()
