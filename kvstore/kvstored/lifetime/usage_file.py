"""The usage of blocks over a restart, in STATE_DIR/usage.npz: access counts and times of last use, the learned state of
policies and predictor, why blocks went, and why slots are in quarantine.

The file is written behind, at most every `INTERVAL_S` while something happens, and at the end of a daemon that stops in
order; so a crash loses the last seconds of it. It is never needed: a file that is missing, damaged or of another
version costs hits, no block, so it is not synced. No request waits for it: it is copied in steps, and a thread writes.

It names blocks by their keys, and tenants as their blocks do. Deleted blocks are not in the next file, unless blocks
are deleted during each of `COLLECTED_MAX` collections in a row; then they are gone from the one after that.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from kvstore_predictor.base import Array, Piece, within
from kvstore_tiers.base import Slot, Tier
from kvstore_tiers.replaced_file import replaced_file
from kvstored.clock import NS_PER_S, Clock
from kvstored.store.blocks import Residency
from kvstored.store.blocks.usage import DTYPE, apply, collect
from kvstored.store.policies import Learns, Origin, Policy
from kvstored.store.prefetch.guarded_predictor import PrefetchState
from kvstored.telemetry import Counters
from kvstored.unsaved import Unsaved

log = logging.getLogger(__name__)
FILE = "usage.npz"
INTERVAL_S = 5.0
REST = 50  # times as long as the last writing took, at least, until the next: 2 % of a core at most
BYTES_A_S = 1 << 20  # written in the long run, at most
COLLECTED_MAX = 3  # times for one file: anew where blocks were deleted meanwhile
FORMAT = 2  # of what is in it beside the use of copies
_FORMAT, _GHOSTS, _TENANTS, _CLOCK, _QUARANTINE = ":format", ":ghosts:", ":tenants", ":clock", ":quarantine"
_PREFETCH = ":prefetch"
_WHY_BYTES = 200
_QUARANTINED = np.dtype([*((name, "<u8") for name in Slot._fields), ("why", f"S{_WHY_BYTES}")])


class UsageFile:
    """The usage file of one daemon. Call `restore`, then make policies, then `follow` them, then `run`."""

    def __init__(self, state_dir: Path, residency: Residency, clock: Clock, unsaved: Unsaved | None = None) -> None:
        self._path = state_dir / FILE
        self._unsaved = unsaved or Unsaved()
        self._residency = residency
        # The mapped tier's memory may outlive the daemon, the durable one does.
        self._tiers = [residency.mapped, *([residency.durable] if residency.durable >= 0 else [])]
        self._writing = threading.Lock()  # a stop saves while the last thread of `run` may still write
        self._clock = clock
        self._nvme: Tier | None = None
        self._policies: Sequence[Policy] = ()
        self._prefetch: PrefetchState | None = None
        self._counters = Counters()
        self._former: dict[str, Array] = {}  # what the file held, until those who learn have it
        self._origin = Origin(np.empty(0, np.int64), 0, 0)
        self._saved_at = (-1, -1, -1)  # requests counted, changes of residency, and hints
        self._written_bytes = 0

    # At the start

    def restore(self, tenants: Collection[str], nvme: Tier | None = None) -> int:
        """Apply the file to the recovered blocks and to the quarantine of `nvme`, and remember blocks of `tenants` (by
        their names in residency) that had gone; return how many copies it knew. Call it before policies take over
        the blocks.
        """
        self._nvme = nvme
        tables = self._read()
        residency, known = self._residency, 0
        for tier, name in enumerate(residency.tiers):
            table = tables.get(name)
            if table is not None and table.dtype == DTYPE and table.ndim == 1:
                known += apply(residency, tier, table, self._clock.monotonic_ns(), self._clock.wall_ns())
        if tables:
            try:
                self._restore_rest(tables, tenants)
            except Exception as error:  # a damaged table raises nearly any
                log.warning("%s is of another version (%s): what was learned begins anew", self._path, error)
        return known

    def _restore_rest(self, tables: dict[str, Array], tenants: Collection[str]) -> None:
        """Restore the parts of the file beside the use of copies. Raises errors for a file of another version."""
        version = tables[_FORMAT].tolist()
        if version != [FORMAT]:
            raise ValueError(f"{version}")
        origin = self._read_origin(tables, tenants)
        for number, tenant in enumerate(origin.tenants.tolist()):
            ghosts = tables.get(f"{_GHOSTS}{number}")
            if ghosts is not None and tenant >= 0:
                self._residency.tenants[tenant].ghost.restore(ghosts, origin.later_ns)
        if self._nvme is not None and (table := tables.get(_QUARANTINE)) is not None:
            reasons = {Slot(*place): why.decode(errors="replace") for *place, why in table.tolist()}
            self._nvme.explain_quarantined(reasons)
        self._former, self._origin = tables, origin

    def follow(self, policies: Sequence[Policy], counters: Counters, prefetch: PrefetchState | None = None) -> None:
        """Let `policies` (by tier) and `prefetch` go on from the learned state of their predecessors. From now on the
        file has what they, and later policies in that list, learn.
        """
        self._policies, self._counters, self._prefetch = policies, counters, prefetch
        tables, self._former = self._former, {}
        for group, learner in self._learners():
            kept = within(tables, f"{group}/")
            names = sorted({name.partition("/")[0] for name in kept})
            try:
                if kept:
                    if learner.name not in names or not isinstance(learner, Learns | PrefetchState):
                        raise ValueError(f"{learner.name} cannot use it")
                    learner.import_state(within(kept, f"{learner.name}/"), self._origin)
            except Exception as error:  # a damaged table raises nearly any
                place, learned_by = group.removeprefix(":"), ", ".join(names)
                log.warning("%s: what %s learned is not used: %s", place, learned_by, error)

    def _learners(self) -> Iterator[tuple[str, Policy | PrefetchState]]:
        """Yield each learner with the group of its tables in the file. Prefetch is left out if it is off or has
        failed.
        """
        yield from zip(self._residency.tiers, self._policies, strict=False)
        if self._prefetch is not None and self._prefetch.works:
            yield _PREFETCH, self._prefetch

    def _read(self) -> dict[str, Array]:
        try:
            with np.load(self._path, allow_pickle=False) as file:
                return {name: file[name] for name in file.files}
        except FileNotFoundError:
            return {}
        except Exception as error:  # a flipped bit raises nearly any, MemoryError and zlib.error too
            log.warning("%s cannot be read (%s): blocks begin with no record of their use", self._path, error)
            return {}

    def _read_origin(self, tables: dict[str, Array], tenants: Collection[str]) -> Origin:
        residency = self._residency
        known = {index.name for index in residency.tenants}.union(tenants)
        names = [name.decode() for name in tables[_TENANTS].tolist()]
        numbers = [residency.tenant(name) if name in known else -1 for name in names]
        later_ns = int(tables[_CLOCK][0]) - self._ahead_ns()
        return Origin(np.array(numbers, np.int64), later_ns, self._clock.monotonic_ns())

    def _ahead_ns(self) -> int:
        """Return how far the wall clock is ahead of the monotonic one, which begins anew with the machine."""
        return self._clock.wall_ns() - self._clock.monotonic_ns()

    # While it serves

    async def run(self) -> None:
        """Save now and then, until cancelled."""
        pause_s = INTERVAL_S
        while True:
            await asyncio.sleep(pause_s)
            began_ns = self._clock.monotonic_ns()
            await self.save()
            took_s = (self._clock.monotonic_ns() - began_ns) / NS_PER_S
            pause_s = max(INTERVAL_S, REST * took_s, self._written_bytes / BYTES_A_S)

    async def save(self) -> None:
        """Write the file, unless nothing has happened since."""
        state = self._state()
        if state == self._saved_at:
            return
        for _ in range(COLLECTED_MAX):
            state, deletions = self._state(), self._residency.deletions
            parts = await self._collected()
            if self._residency.deletions == deletions:
                break
        try:
            await asyncio.to_thread(self._write, parts)
        except OSError as error:
            self._unsaved.failed(self._path, error, "a restart forgets how blocks were used")
            return
        self._unsaved.saved(self._path)
        self._saved_at = state

    def _state(self) -> tuple[int, int, int]:
        requests = self._counters["acquires"] + self._counters["stored_blocks"]
        return requests, self._residency.changes, self._prefetch.hints if self._prefetch is not None else 0

    async def _collected(self) -> dict[str, list[Array]]:
        parts: dict[str, list[Array]] = {}
        for name, piece in self._pieces():
            parts.setdefault(name, []).append(piece)
            await asyncio.sleep(0)
        return parts

    def _pieces(self) -> Iterator[Piece]:
        residency = self._residency
        yield _FORMAT, np.array([FORMAT])
        for tier in self._tiers:
            for usage in collect(residency, tier, self._ahead_ns()):
                yield residency.tiers[tier], usage
        for group, learner in self._learners():
            for name, piece in learner.export_state() if isinstance(learner, Learns | PrefetchState) else ():
                yield f"{group}/{learner.name}/{name}", piece
        for number, index in enumerate(residency.tenants):
            for piece in index.ghost.copied():
                yield f"{_GHOSTS}{number}", piece
        if self._nvme is not None:
            held = [(*place, why.encode()[:_WHY_BYTES]) for place, why in self._nvme.quarantined().items()]
            yield _QUARANTINE, np.array(held, _QUARANTINED)
        yield _CLOCK, np.array([self._ahead_ns()])
        yield _TENANTS, np.array([index.name.encode() for index in residency.tenants], "S")  # last: none is missing

    def _write(self, parts: dict[str, list[Array]]) -> None:
        """Write the file as `np.savez` would, but piece by piece: a large copy would hold the GIL."""
        with self._writing, replaced_file(self._path, durable=False) as file:
            with zipfile.ZipFile(file, "w") as archive:
                for name, pieces in parts.items():
                    first, count = pieces[0], sum(map(len, pieces))
                    descr, shape = npy.dtype_to_descr(first.dtype), (count, *first.shape[1:])
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        npy.write_array_header_1_0(member, {"descr": descr, "fortran_order": False, "shape": shape})
                        for piece in pieces:
                            member.write(piece.tobytes())
            self._written_bytes = file.tell()
