"""The scrubber's process: `python -m kvstored.health.scrub.worker SETTINGS`, started by the daemon alone.

Reads slots and reports to standard output, one JSON object a line; ends when standard input ends, or with its
parent. Owns the pass; the daemon keeps its place. Never writes to the tier's directory, never decides that a block is
bad.
Messages: {"read": {bytes, slots, slab, slot}}, {"suspect": {...}}, {"unreadable": {slab, error}},
{"pass": {began_s, ended_s, bytes, slots}}, {"position": {...}}.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import select
import signal
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_tiers.nvme.directory_files import slab_numbers

if TYPE_CHECKING:  # the daemon needs the settings alone
    from kvstored.health.scrub.slab_reader import SlotReading

REPORTED_EVERY_S = 1.0
SAVED_EVERY_S = 5.0
LONGEST_WAIT_S = 60.0
NICE = 19
_PR_SET_PDEATHSIG = 1
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # glibc has no wrapper
_IOPRIO_IDLE = 3 << 13
_END = 2**63  # above every number that is meant


class Pace:
    """A limit of `rate_bytes` bytes a second on reads. After a large read the next one waits longer."""

    def __init__(self, rate_bytes: int) -> None:
        self._rate_bytes = rate_bytes
        self._free_at_s = 0.0

    def take(self, nbytes: int, now_s: float) -> float:
        """Count a read of `nbytes` that is about to begin at `now_s`. Return how many seconds to wait before it."""
        start_s = max(now_s, self._free_at_s)
        self._free_at_s = start_s + nbytes / self._rate_bytes
        return start_s - now_s


@dataclass
class Position:
    """The scrubber's position: the next slot to read (`slab`, `slot`), and when passes over all slabs began and ended,
    in wall-clock seconds, 0 for never. It is kept over restarts. A position with odd values is replaced by the start of
    a pass."""

    slab: int = 0
    slot: int = 0
    pass_began_s: float = 0.0  # of the pass under way; 0 between passes
    pass_bytes: int = 0
    pass_slots: int = 0
    last_pass_s: float = 0.0  # when a whole pass last ended
    last_pass_began_s: float = 0.0

    def due_in_s(self, interval_s: float, now_s: float) -> float:
        """Return in how many seconds the next pass over all slabs should begin, if passes begin every `interval_s`
        seconds. Return 0 if a pass is under way, or the clock was set back."""
        if self.pass_began_s:
            return 0.0
        waited_s = now_s - self.last_pass_began_s
        return max(0.0, interval_s - waited_s) if waited_s >= 0 else 0.0

    def begin(self, now_s: float) -> None:
        if not self.pass_began_s:
            self.slab = self.slot = self.pass_bytes = self.pass_slots = 0
            self.pass_began_s = now_s

    def end(self, now_s: float) -> None:
        self.last_pass_s, self.last_pass_began_s, self.pass_began_s = now_s, self.pass_began_s, 0.0
        self.slab = self.slot = 0


def position_of(content: bytes) -> Position:
    """Return the position in the JSON text `content`, or the start of a new pass if it is not valid."""
    try:
        raw = json.loads(content)
        position = Position(**{field.name: type(field.default)(raw[field.name]) for field in fields(Position)})  # type: ignore[misc]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return Position()
    return position if all(0 <= value < _END for value in asdict(position).values()) else Position()


class InputClosed(Exception):
    """An error: the daemon has closed this process's standard input, so the process should end."""


@dataclass(frozen=True)
class ScrubSettings:
    """The settings that the daemon gives to the scrubber's process. `position` is JSON, or "" for none."""

    directory: str
    position: str
    rate_bytes: int
    interval_s: float


class ScrubWorker:
    """The main loop of the scrubber's process: it reads all slabs again and again, until the daemon closes the
    process's standard input."""

    def __init__(self, settings: ScrubSettings) -> None:
        self._slabs = Path(settings.directory) / "slabs"
        self._interval_s = settings.interval_s
        self._pace = Pace(settings.rate_bytes)
        self._position = position_of(settings.position.encode())
        self._reported_s = self._saved_s = time.monotonic()
        self._unreported_bytes = self._unreported_slots = 0

    def run(self) -> None:
        while True:
            due_s = self._position.due_in_s(self._interval_s, time.time())
            if due_s:
                pause(min(due_s, LONGEST_WAIT_S))
                continue
            self._pass()

    def _pass(self) -> None:
        from kvstored.health.scrub.slab_reader import SlabReader

        position = self._position
        position.begin(time.time())
        for number in slab_numbers(self._slabs):
            if number < position.slab:
                continue
            first = position.slot if number == position.slab else 0
            reader = SlabReader(self._slabs / f"{number:08d}.slab", number, self._wait)
            try:
                for reading in reader.readings(first):
                    self._note(reading)
            except OSError as error:
                say("unreadable", {"slab": number, "error": str(error)})
        position.end(time.time())
        self._report()
        self._save()
        say(
            "pass",
            {
                "began_s": position.last_pass_began_s,
                "ended_s": position.last_pass_s,
                "bytes": position.pass_bytes,
                "slots": position.pass_slots,
            },
        )

    def _note(self, reading: SlotReading) -> None:
        position = self._position
        position.slab, position.slot = reading.slab, reading.next_slot
        position.pass_bytes += reading.nbytes
        position.pass_slots += 1
        self._unreported_bytes += reading.nbytes
        self._unreported_slots += 1
        if reading.suspect is not None:
            self._report()
            say("suspect", asdict(reading.suspect))
        self._now_and_then()

    def _wait(self, nbytes: int) -> None:
        pause(self._pace.take(nbytes, time.monotonic()))

    def _now_and_then(self) -> None:
        now_s = time.monotonic()
        if now_s - self._reported_s >= REPORTED_EVERY_S:
            self._report()
        if now_s - self._saved_s >= SAVED_EVERY_S:
            self._save()

    def _report(self) -> None:
        self._reported_s = time.monotonic()
        if self._unreported_slots:
            at = {"slab": self._position.slab, "slot": self._position.slot}
            say("read", {"bytes": self._unreported_bytes, "slots": self._unreported_slots, **at})
            self._unreported_bytes = self._unreported_slots = 0

    def _save(self) -> None:
        self._saved_s = time.monotonic()
        say("position", asdict(self._position))


def say(what: str, fields: dict[str, object]) -> None:
    try:
        os.write(sys.stdout.fileno(), json.dumps({what: fields}).encode() + b"\n")
    except BrokenPipeError:
        raise InputClosed from None


def pause(seconds: float) -> None:
    """Sleep for `seconds`. Raises InputClosed when standard input is closed."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], max(0.0, seconds))
    if readable and not os.read(sys.stdin.fileno(), 64):
        raise InputClosed


def step_back() -> None:
    """Take the lowest CPU and I/O priority, and let the kernel kill this process when the daemon ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        libc.syscall(number, 1, 0, _IOPRIO_IDLE)


def main(argv: list[str]) -> int:
    parent = os.getppid()
    step_back()
    if os.getppid() != parent:
        return 0  # it died before we were tied to it
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the daemon too, whose end is ours
        signal.signal(number, signal.SIG_IGN)
    settings = ScrubSettings(**json.loads(argv[1]))
    try:
        ScrubWorker(settings).run()
    except InputClosed:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
