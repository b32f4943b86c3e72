"""What blocks were used for, over a restart: access counts and times of last use, in STATE_DIR/usage.npz.

Written behind, every `INTERVAL_S` at most while there are requests, and at the end of a daemon that stops in order; so
a crash forgets the last seconds of it. It is never needed: a file that is missing, damaged or of another state costs
hits, no block, so it is not synced. Never in the way of an answer: columns are copied in steps, and a thread writes.
"""

from __future__ import annotations

import asyncio
import io
import logging
import threading
import zipfile
from pathlib import Path

import numpy as np

from kvstored.clients.tenants.private_file import write_private
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.blocks import Residency
from kvstored.store.blocks.usage import DTYPE, Usage, apply, collect
from kvstored.store.tiering import MAPPED
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
FILE = "usage.npz"
INTERVAL_S = 5.0
REST = 50  # times as long as the last writing took, at least, until the next: 2 % of a core at most


def restore_usage(state_dir: Path, residency: Residency, clock: Clock) -> int:
    """Apply what is in the file to the blocks that were found; how many copies it knew."""
    path = state_dir / FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            tables = {name: file[name] for name in file.files}
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, KeyError) as error:
        log.warning("%s cannot be read (%s): blocks begin with no record of their use", path, error)
        return 0
    known = 0
    for tier, name in enumerate(residency.tiers):
        table = tables.get(name)
        if table is not None and table.dtype == DTYPE and table.ndim == 1:
            known += apply(residency, tier, table, clock.monotonic_ns(), clock.wall_ns())
    return known


class UsageFile:
    """Keeps the file of one daemon, for the mapped tier, whose memory may outlive it, and the durable one."""

    def __init__(self, state_dir: Path, residency: Residency, clock: Clock, counters: Counters) -> None:
        self._path = state_dir / FILE
        self._residency = residency
        self._tiers = [MAPPED, *([residency.durable] if residency.durable >= 0 else [])]
        self._writing = threading.Lock()  # a stop saves while the last thread of `run` may still write
        self._clock = clock
        self._counters = counters
        self._saved_at = -1  # of the requests counted
        self._failed = False

    async def run(self) -> None:
        """Until it is cancelled."""
        pause_s = INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            began_ns = self._clock.monotonic_ns()
            await self.save()
            pause_s = max(INTERVAL_S, REST * (self._clock.monotonic_ns() - began_ns) / NS_PER_S)

    async def save(self) -> None:
        """Write the file, unless there was no request since."""
        requests = self._counters["acquires"] + self._counters["stored_blocks"]
        if requests == self._saved_at:
            return
        tables: dict[str, list[Usage]] = {}
        ahead_ns = self._clock.wall_ns() - self._clock.monotonic_ns()
        for tier in self._tiers:
            parts = tables[self._residency.tiers[tier]] = []
            for part in collect(self._residency, tier, ahead_ns):
                parts.append(part)
                await asyncio.sleep(0)
        try:
            await asyncio.to_thread(self._write, tables)
        except OSError as error:
            if not self._failed:
                log.warning("%s cannot be written (%s): a restart forgets how blocks were used", self._path, error)
            self._failed = True
            return
        self._saved_at, self._failed = requests, False

    def _write(self, tables: dict[str, list[Usage]]) -> None:
        joined = {name: np.concatenate(parts) if parts else np.empty(0, DTYPE) for name, parts in tables.items()}
        content = io.BytesIO()
        np.savez(content, **joined)  # type: ignore[arg-type]
        with self._writing:
            write_private(self._path, content.getbuffer(), durable=False)
