"""The daemon's end of the scrubber: starts the worker, verifies what it reports, and ends it with the daemon.

Owns the child process and its report. A suspect is looked up in the index (the slot may hold another block by
now) and verified through the daemon's own read path; only what fails there too is damage. A record that does not hold
is no danger to readers, but its block would be lost at the next start: the record is written again.
A worker that dies is started again, at most `RESTARTS` times in `RESTARTS_IN_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore_tiers.base import Tier
from kvstored.clock import NS_PER_S, Clock
from kvstored.health.scrub.position import load
from kvstored.health.scrub.verification import Verification
from kvstored.health.scrub.worker import Settings
from kvstored.store.blocks import Residency
from kvstored.telemetry import Counters
from kvstored.unsaved import Unsaved

log = logging.getLogger(__name__)
RESTARTS, RESTARTS_IN_S = 5, 3600
ENDING_S = 5.0
POSITION_FILE = "scrub.json"


@dataclass
class ScrubReport:
    """`state`: off | starting | waiting | reading | failed. Times are wall-clock seconds, 0 for never."""

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


class Scrubber:
    """`run` is a task until it is cancelled; it starts the first worker after `start_s`. `sync` makes durable what the
    tier published."""

    def __init__(
        self,
        settings: Settings,
        residency: Residency,
        nvme: Tier,
        verification: Verification,
        sync: Callable[[], Awaitable[bool]],
        clock: Clock,
        counters: Counters,
        *,
        start_s: float,
    ) -> None:
        self._settings = settings
        self.unsaved = Unsaved()
        self._start_s = start_s
        self._residency = residency
        self._nvme = nvme
        self._verification = verification
        self._sync = sync
        self._clock = clock
        self._counters = counters
        self._deaths_ns: deque[int] = deque()
        self.report = ScrubReport("starting")
        self.report.last_pass_s = load(Path(settings.position)).last_pass_s

    async def run(self) -> None:
        await asyncio.sleep(self._start_s)
        while self._may_start():
            status = await self._run_worker()
            self._deaths_ns.append(self._clock.monotonic_ns())
            log.warning("the scrubber's worker ended with status %s; starting it again", status)
        self.report.state, self.report.pid = "failed", 0
        self.report.message = f"the scrubber's worker died {RESTARTS} times within an hour; it is off until a restart"
        log.error("%s", self.report.message)

    def _may_start(self) -> bool:
        now_ns = self._clock.monotonic_ns()
        while self._deaths_ns and now_ns - self._deaths_ns[0] > RESTARTS_IN_S * NS_PER_S:
            self._deaths_ns.popleft()
        return len(self._deaths_ns) < RESTARTS

    async def _run_worker(self) -> int:
        """One life of the worker; its exit status. Cancelled: it is gone before this returns, unless it cannot end."""
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstored.health.scrub.worker", json.dumps(asdict(self._settings)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
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
            self._counters.add("scrubbed_bytes", int(fields["bytes"]))
        elif what == "pass":
            report.state = "waiting"
            report.last_pass_s = float(fields["ended_s"])
            report.last_pass_slots, report.last_pass_bytes = int(fields["slots"]), int(fields["bytes"])
            log.info("scrubbed %d slots, %d bytes", report.last_pass_slots, report.last_pass_bytes)
        elif what == "unsaved":
            error = OSError(fields["errno"], fields["error"])
            self.unsaved.failed(Path(self._settings.position), error, "after a restart scrubbing begins at the front")
        elif what == "saved":
            self.unsaved.saved(Path(self._settings.position))
        elif what == "suspect":
            report.suspects += 1
            await self._judge(fields)
        elif what == "unreadable":
            log.warning("slab %s cannot be scrubbed: %s", fields["slab"], fields["error"])
        else:
            raise ValueError(f"no message is called {what!r}")

    async def _judge(self, suspect: dict[str, Any]) -> None:
        residency = self._residency
        row = residency.row_at(residency.durable, int(suspect["slab"]), int(suspect["offset"]))
        if row < 0 or not residency.has(row, residency.durable):
            return
        if suspect["key"]:
            named = (suspect["key"], int(suspect["generation"]))
            if named != (residency.key(row).hex(), residency.slot(row, residency.durable).generation):
                return  # another block is there by now
        token, slot = residency.token(row), residency.slot(row, residency.durable)
        outcome = await self._verification.verify(row)
        if outcome is None or (outcome.ok and suspect["key"]):
            return
        self.report.corrupt += 1
        self._counters.add("scrub_corrupt")
        still_there = residency.current(token) == row and residency.has(row, residency.durable)
        if outcome.header is not None and still_there and residency.slot(row, residency.durable) == slot:
            key = residency.key(row).hex()
            self._nvme.publish_again(slot, outcome.header)
            if await self._sync():
                log.warning(
                    "the record of block %s on NVMe was damaged (slab %s slot %s): written again from the slot",
                    key, suspect["slab"], suspect["slot"],
                )  # fmt: skip
