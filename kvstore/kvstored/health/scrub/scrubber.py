"""The daemon's end of the scrubber: it starts the worker, verifies its suspects, and ends it with the daemon.

The module owns the child process and its report. A suspect is looked up in the index (the slot may hold another block
by now) and verified through the daemon's own read path; it is damage only if it fails there too. A damaged record is no
danger to readers, but its block would be lost at the next start: the record is written again. A worker that dies is
started again, at most `RESTARTS` times in `RESTARTS_IN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstore_tiers.segments import AlignedBuffer
from kvstored.clock import NS_PER_S
from kvstored.health.scrub.worker import ScrubSettings, position_of
from kvstored.store.assembly import Store
from kvstored.store.blocks.listing import row_at
from kvstored.store.transfer.lane import Priority, Refused
from kvstored.store.transfer.link import lane_name
from kvstored.store.transfer.mover import LaneTransfer

log = logging.getLogger(__name__)
RESTARTS, RESTARTS_IN_S = 5, 3600
ENDING_S = 5.0


@dataclass
class ScrubReport:
    """A report on the scrubber (the background check of NVMe) for operators. `state` is off, starting, waiting, reading
    or failed. Times are wall-clock seconds, 0 for never."""

    state: str = "off"
    pid: int = 0
    read_bytes: int = 0
    read_slots: int = 0
    suspects: int = 0
    corrupt: int = 0
    last_pass_s: float = 0.0
    last_pass_slots: int = 0
    last_pass_bytes: int = 0
    message: str = ""


class Verification:
    """A component that verifies single blocks on NVMe through the daemon's own read path, at the lowest priority. It
    needs a buffer of one block for that time. The row is pinned while its slot is read, so the answer is about that
    very block."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def verify(self, row: int) -> Outcome | None:
        """Read and verify the NVMe copy of the block at `row`. Return the outcome, or None if the copy cannot be read
        now. A damaged copy is not used any more afterwards."""
        residency, nvme, breaker = self._store.residency, self._store.nvme, self._store.breaker
        if nvme is None or breaker is None or not breaker.serves_reads:
            return None
        durable = residency.durable
        lane = lane_name(residency.tiers, durable, residency.mapped)
        slot, key, token = residency.slot(row, durable), residency.key(row), residency.token(row)
        buffer = AlignedBuffer(slot.nbytes)
        ended: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        number = 0

        def start(done: Completion) -> None:
            nonlocal number
            number = breaker.began()
            nvme.read(slot, key, [buffer.segment(slot.nbytes)], done)

        def done(outcome: Outcome) -> None:
            breaker.ended(number, "read", outcome)
            ended.set_result(outcome)

        residency.pin(row)
        try:
            ticket = self._store.mover.submit(lane, Priority.MAINTENANCE, slot.nbytes, LaneTransfer(start, done))
            if isinstance(ticket, Refused):
                return None
            outcome = await asyncio.shield(ended)
        finally:
            if residency.current(token) == row:
                residency.unpin(row)
        if outcome.kind is not OutcomeKind.CORRUPT:
            return outcome if outcome.ok else None
        if residency.current(token) == row and residency.has(row, durable) and residency.slot(row, durable) == slot:
            if residency.being_filled(row):
                return None  # it is being promoted: that read finds it out, and deals with it
            self._store.damage.found(durable, row, outcome.message)
        return outcome


class ScrubPositionStore(Protocol):
    """A keeper of the scrubber's position over restarts. `scrub` is the position as JSON, None if there is none. The
    event `was_tried` is set when the daemon has tried to read the saved one."""

    scrub: bytes | None
    was_tried: asyncio.Event


class Scrubber:
    """The daemon's side of the process that scrubs (verifies in the background) the NVMe tier of `store`. Run `run` as
    a task. `place` keeps its position.
    """

    def __init__(self, settings: ScrubSettings, store: Store, place: ScrubPositionStore) -> None:
        self._settings = settings
        self._store = store
        self._place = place
        self._verification = Verification(store)
        self._deaths_ns: deque[int] = deque()
        self.report = ScrubReport("starting")

    async def run(self) -> None:
        """Run the scrubber's process, which begins at the saved position. When the process dies it is started again, at
        most a few times an hour."""
        await asyncio.sleep(self._store.config.scrub.start_s)
        await self._place.was_tried.wait()
        self.report.last_pass_s = position_of(self._place.scrub or b"").last_pass_s
        while self._may_start():
            status = await self._run_worker()
            self._deaths_ns.append(self._store.clock.monotonic_ns())
            log.warning("the scrubber's worker ended with status %s; starting it again", status)
        self.report.state, self.report.pid = "failed", 0
        self.report.message = f"the scrubber's worker died {RESTARTS} times within an hour; it is off until a restart"
        log.error("%s", self.report.message)

    def _may_start(self) -> bool:
        now_ns = self._store.clock.monotonic_ns()
        while self._deaths_ns and now_ns - self._deaths_ns[0] > RESTARTS_IN_S * NS_PER_S:
            self._deaths_ns.popleft()
        return len(self._deaths_ns) < RESTARTS

    async def _run_worker(self) -> int:
        """One life of the worker; its exit status. Cancelled: it is gone before this returns, unless it cannot end."""
        settings = replace(self._settings, position=(self._place.scrub or b"").decode(errors="replace"))
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstored.health.scrub.worker", json.dumps(asdict(settings)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            process_group=0,  # a terminal's signals are the daemon's
        )  # fmt: skip
        assert worker.stdin is not None and worker.stdout is not None
        self.report.state, self.report.pid = "waiting", worker.pid
        try:
            async for line in worker.stdout:
                try:
                    ((what, fields),) = json.loads(line).items()
                    await self._hear(what, fields)
                except (ValueError, KeyError, TypeError) as error:
                    log.warning("the scrubber's worker said %r: %r", line[:200], error)
            return await worker.wait()
        finally:
            worker.stdin.close()
            try:
                await asyncio.wait_for(asyncio.shield(worker.wait()), ENDING_S)
            except asyncio.TimeoutError:  # noqa: UP041  # not the same as TimeoutError before Python 3.11
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
                with contextlib.suppress(asyncio.TimeoutError):  # on a disk that hangs not even SIGKILL ends it
                    await asyncio.wait_for(asyncio.shield(worker.wait()), ENDING_S)

    async def _hear(self, what: str, fields: dict[str, Any]) -> None:
        report = self.report
        if what == "read":
            report.state = "reading"
            report.read_bytes += int(fields["bytes"])
            report.read_slots += int(fields["slots"])
            self._store.counters.add("scrubbed_bytes", int(fields["bytes"]))
        elif what == "pass":
            report.state = "waiting"
            report.last_pass_s = float(fields["ended_s"])
            report.last_pass_slots, report.last_pass_bytes = int(fields["slots"]), int(fields["bytes"])
            log.info("scrubbed %d slots, %d bytes", report.last_pass_slots, report.last_pass_bytes)
        elif what == "position":
            self._place.scrub = json.dumps(fields).encode()
        elif what == "suspect":
            report.suspects += 1
            await self._judge(fields)
        elif what == "unreadable":
            log.warning("slab %s cannot be scrubbed: %s", fields["slab"], fields["error"])
        else:
            raise ValueError(f"no message is called {what!r}")

    async def _judge(self, suspect: dict[str, Any]) -> None:
        residency, nvme, writeback = self._store.residency, self._store.nvme, self._store.writeback
        assert nvme is not None and writeback is not None
        row = row_at(residency, residency.durable, int(suspect["slab"]), int(suspect["offset"]))
        if row < 0 or not residency.has(row, residency.durable):
            return
        if suspect["key"]:
            is_same = int(suspect["generation"]) == residency.slot(row, residency.durable).generation
            if not is_same or not (suspect["is_encrypted"] or suspect["key"] == residency.key(row).hex()):
                return  # another block is there by now
        token, slot = residency.token(row), residency.slot(row, residency.durable)
        outcome = await self._verification.verify(row)
        if outcome is None or (outcome.ok and suspect["key"]):
            return
        self.report.corrupt += 1
        self._store.counters.add("scrub_corrupt")
        still_there = residency.current(token) == row and residency.has(row, residency.durable)
        if outcome.header is not None and still_there and residency.slot(row, residency.durable) == slot:
            key = residency.key(row).hex()
            nvme.publish_again(slot, outcome.header)
            if await writeback.sync():
                log.warning(
                    "the record of block %s on NVMe was damaged (slab %s slot %s): written again from the slot",
                    key, suspect["slab"], suspect["slot"],
                )  # fmt: skip
