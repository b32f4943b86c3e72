"""The NVMe tier: blocks in preallocated slab files, durable after `sync`.

Owns the directory while it is open and joins its parts: space (which slots), slot transfers and the resident threads
(bytes), journal, record commit and seal (durability), recovery, health. Never knows what is worth keeping.
Invariant: `used_bytes` never exceeds the capacity.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kvstore_proto.arena import SEALED, BlockHeader
from kvstore_tiers import failpoints
from kvstore_tiers.base import (
    UNCODED,
    Coding,
    Column,
    Completion,
    Load,
    MemoryKind,
    Outcome,
    OutcomeKind,
    RunCompletion,
    Segment,
    Slot,
    TierInfo,
    TierState,
    TierStatistics,
    require_fits,
)
from kvstore_tiers.codecs import AUTO
from kvstore_tiers.codecs.scratch import Scratch
from kvstore_tiers.containers import ContainerTier
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import require_slot_size
from kvstore_tiers.nvme.commit import Journal, RecordCommit
from kvstore_tiers.nvme.data_keys import DataKeys
from kvstore_tiers.nvme.directory import SEAL, Seal, TierDirectory
from kvstore_tiers.nvme.directory_files import DirectoryUnusable
from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstore_tiers.nvme.health import TierHealth, probe_medium, require_place
from kvstore_tiers.nvme.layout import key_number, record_header, record_holds
from kvstore_tiers.nvme.recovery import Recovery, RecoveryReport, open_slabs, recovered_blocks, still_there
from kvstore_tiers.nvme.slab import SlotState
from kvstore_tiers.nvme.slot_transfers import SlotPlace, SlotTransfers
from kvstore_tiers.nvme.space import DEFAULT_SLAB_BYTES, FILES_BYTES, SlabSpace
from kvstore_tiers.recovered import RecoveredBlocks
from kvstore_tiers.threads import PendingWrites, ResidentThreads

_LOG = logging.getLogger(__name__)
DEFAULT_IO_THREADS = 6  # measured: more collapse under CPU load (they queue for the GIL), fewer leave the disk idle
DEFAULT_QUARANTINE_SLOTS = 16
_UNEXPLAINED = "quarantined before the last start"


class TierOptions(NamedTuple):
    """The options of an NVMe tier; `NvmeTier.open` explains them."""

    io_threads: int
    quarantine_slots: int
    clock: Callable[[], float]
    name: str
    coding: Coding
    keys: DataKeys | None


class NvmeTier(ContainerTier):
    """A tier that keeps blocks in slab files (files cut into slots) of one directory. They are durable after `sync`.
    `NvmeTier.open` makes one.
    """

    def __init__(
        self,
        directory: TierDirectory,
        space: SlabSpace,
        seal: Seal,
        recovery: Recovery,
        report: RecoveryReport,
        recovered: RecoveredBlocks,
        options: TierOptions,
    ) -> None:
        coding = options.coding
        self.info = TierInfo(
            options.name, "nvme", MemoryKind.FILE, is_durable=True, container_bytes=space.growth_bytes,
            lends_files=coding.is_none, coding=coding, dram_bytes=coding.staging_bytes,
        )  # fmt: skip
        self.recovery_report = report
        self._recovered: RecoveredBlocks | None = recovered
        self._is_as_recovered = True  # no slot was freed or quarantined since
        self._directory = directory
        self._space = self._containers = space
        self._seal = seal
        self._max_quarantined = options.quarantine_slots
        self._quarantined: dict[Slot, str] = {}
        self._journal = Journal(report.last_sequence + 1)
        self._health = TierHealth(options.clock)
        self._recovery = recovery
        if recovery.owed is not None:
            self._health.hold_back(
                f"{directory.path} cannot be written ({recovery.owed.strerror}): what it holds is read"
            )
        self._counters = TransferCounters()
        scratch = Scratch(coding.staging_bytes // 2)  # the other half is for what is about to be stored
        self._keys, coding.rates.threads = options.keys, options.io_threads
        self._transfers = SlotTransfers(
            self._journal, self._health, self._counters, scratch, coding.rates, options.keys
        )
        self._pending = PendingWrites()
        self._threads = ResidentThreads(f"{options.name}-io", options.io_threads)
        if coding.codec == AUTO and (made := next((slab for slab in space.slabs.values() if slab.is_made), None)):
            self._threads.submit(partial(self._transfers.measure, made), lambda outcome: None)
        self._commit = RecordCommit(self._journal, self._health.watch_write, self._make_up)
        self._closed = False
        for slab in space.slabs.values():
            for index in slab.indices_in(SlotState.QUARANTINED):
                self._quarantined[slab.slot(index)] = _UNEXPLAINED

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        slab_bytes: int = DEFAULT_SLAB_BYTES,
        io_threads: int = DEFAULT_IO_THREADS,
        require_direct: bool = False,
        quarantine_slots: int = DEFAULT_QUARANTINE_SLOTS,
        clock: Callable[[], float] = time.monotonic,
        name: str = "nvme",
        coding: Coding = UNCODED,
        early_scan: EarlyRecordScan | None = None,
        keys: DataKeys | None = None,
    ) -> NvmeTier:
        """Lock and open `directory`, which is made if it is missing, as a tier of at most `capacity_bytes` bytes.
        `slab_bytes` is the size of new slab files, `io_threads` the number of threads for transfers, `quarantine_slots`
        the most corrupt slots that are kept. With `require_direct` a file system without direct I/O is refused.
        `early_scan`, if given, may have judged the records already; it is closed. `keys` encrypts the blocks of tenants
        that have one; without it encrypted blocks stay, and cannot be read. Raises DirectoryInUse, FormatUnsupported or
        DirectoryUnusable.
        """
        if capacity_bytes <= FILES_BYTES:
            raise DirectoryUnusable(f"{capacity_bytes} bytes for {directory} hold no block: give it a larger capacity")
        opened = TierDirectory(directory)
        try:
            if require_direct:
                opened.require_direct()
            space = SlabSpace(opened, capacity_bytes, slab_bytes, require_direct=require_direct)
            report = open_slabs(opened, space, require_direct=require_direct)
            seal = Seal(opened.path)
            still_holds = early_scan is not None and early_scan.is_of(opened.former)
            ahead = early_scan if still_holds else None
            recovery = Recovery(opened, space, seal, report, ahead, keys)
            recovered = recovery.run()
        except OSError as error:
            opened.close()
            raise DirectoryUnusable(f"{directory} cannot be read: {error}") from error
        except BaseException:
            opened.close()
            raise
        finally:
            if early_scan is not None:
                early_scan.close()
        options = TierOptions(io_threads, quarantine_slots, clock, name, coding, keys)
        return cls(opened, space, seal, recovery, report, recovered, options)

    @property
    def path(self) -> Path:
        return self._directory.path

    # -- places ------------------------------------------------------------------------------------------------------

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        if self._closed or not self._health.may_write:
            return None
        found = self._space.allocate(nbytes, may_grow=self._health.may_grow)
        return None if found is None else found[1]

    def free(self, slot: Slot) -> None:
        self._is_as_recovered = False
        slab, index = self._space.free(slot)
        self._journal.note_freed(slab, index, slab.generations[index])
        self._quarantined.pop(slot, None)

    def quarantine(self, slot: Slot, reason: str) -> None:
        slab, index, _ = self._place(slot)
        if len(self._quarantined) >= self._max_quarantined:
            self.free(slot)
            return
        self._is_as_recovered = False
        slab.states[index] = SlotState.QUARANTINED
        self._quarantined[slot] = reason
        self._journal.note_quarantined(slab, index)

    def quarantined(self) -> dict[Slot, str]:
        """Return the slots that are in quarantine (kept because their block is corrupt), with the reason of each, as
        far as it is known. `free` ends a slot's quarantine.
        """
        return dict(self._quarantined)

    def explain_quarantined(self, reasons: Mapping[Slot, str]) -> None:
        for slot in self._quarantined.keys() & reasons.keys():
            if self._quarantined[slot] == _UNEXPLAINED:
                self._quarantined[slot] = reasons[slot]

    def describe_quarantined(self, slot: Slot) -> BlockHeader | None:
        slab, index, _ = self._place(slot)
        record = slab.file.read_record(index) if slab.is_made else b""
        if not record_holds(record, slab.superblock.record_seed(index)):
            return None
        header = self._revealed(record_header(record))
        return header if header is not None and any(header.key) else None

    def check_books(self) -> list[str]:
        return self._space.check_books(self._quarantined)

    def check_held(self, containers: Column, offsets: Column, generations: Column) -> list[str]:
        return self._space.check_held(containers, offsets, generations)

    def publish_again(self, slot: Slot, header: BlockHeader) -> None:
        place = self._place(slot)
        slab, index, _ = place
        if slab.stored(index)[1] & SEALED:  # the record says what the slot says
            self._threads.submit(partial(self._transfers.name_again, place), self._pending.begin(lambda _: None))
        else:
            self._journal.note_written(slab, index, replace(header, tokens=b""))

    def discard(self, container: int, done: Completion) -> None:
        """Delete the file of the slab number `container`, which must be set aside and empty. After `done` got DONE, the
        caller calls `discarded`. Raises RuntimeError if one of its slots is in use."""
        slab = self._space.slabs[container]
        if slab.used_slots:
            raise RuntimeError(f"slab {container} is not empty")

        def remove() -> Outcome:
            slab.remove()
            return Outcome(OutcomeKind.DONE)

        self._threads.submit(remove, done)

    def discarded(self, container: int) -> None:
        """Note that `discard` has deleted the file of the slab number `container`, so that its bytes no longer
        count.
        """
        slab = self._space.slabs[container]
        self._space.discard(slab)
        slab.close()

    # -- transfers ---------------------------------------------------------------------------------------------------

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        require_fits(slot, header, segments)
        store = partial(self._transfers.store, self._place(slot), header, segments)
        self._threads.submit(store, self._pending.begin(done))

    def move_in_run(
        self, slots: Sequence[Slot], sources: Sequence[Segment], keys: Sequence[bytes], done: RunCompletion
    ) -> None:
        steps = [partial(self._transfers.store_image, self._place(slot)) for slot in slots]
        self._threads.submit_run(list(map(partial, steps, sources, keys)), self._pending.begin(done))

    def move_out_run(
        self, slots: Sequence[Slot], destinations: Sequence[Segment], keys: Sequence[bytes], done: RunCompletion
    ) -> None:
        steps = [partial(self._transfers.load_image, self._place(slot)) for slot in slots]
        self._threads.submit_run(list(map(partial, steps, destinations, keys)), done)

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self._threads.submit(partial(self._transfers.load, self._place(slot), expect_key, segments), done)

    def lend(self, slot: Slot, load: Load, done: Completion) -> None:
        self._threads.begin(partial(self._transfers.lend, self._place(slot), load, done), done)

    def relocate(self, source: Slot, target: Slot, expect_key: bytes, done: Completion) -> None:
        copy = partial(self._transfers.copy, self._place(source), self._place(target), expect_key)
        self._threads.submit(copy, self._pending.begin(done))

    def sync(self, done: Completion) -> None:
        self._pending.when_ended(lambda _: self._commit.request(done))

    @property
    def keeps_recovered(self) -> bool:
        return self._recovery.is_on_medium

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        self._threads.submit(self._probe if thorough else self._look, done)

    def location(self, slot: Slot) -> str:
        return f"{self._directory.slab_path(self._space.of(slot).number)}:{slot.offset}"

    def recover(self) -> Iterator[tuple[Slot, BlockHeader]]:
        self._recovered = None  # the caller will not ask for columns too
        for slab in list(self._space.slabs.values()):
            for slot, named in recovered_blocks(slab, self.recovery_report.last_sequence) if slab.is_made else ():
                yield slot, self._revealed(named) or named

    def recover_columns(self) -> RecoveredBlocks:
        """Return the recovered blocks that are still in their slots, as arrays. The first call is quick, and frees
        memory of recovery; a later call reads the records again.
        """
        recovered, self._recovered = self._recovered, None
        if recovered is None:
            return super().recover_columns()
        if self._is_as_recovered:
            return recovered
        there = still_there(self._space.slabs, recovered)
        return recovered if there.all() else recovered.take(there)

    @property
    def state(self) -> TierState:
        return TierState.CLOSED if self._closed else self._health.state

    def statistics(self) -> TierStatistics:
        space = self._space
        quarantine_bytes = sum(slot.nbytes for slot in self._quarantined)
        blocks_bytes = space.blocks_bytes - quarantine_bytes
        free_bytes = space.nbytes - blocks_bytes - quarantine_bytes
        used_by = {"blocks": blocks_bytes, "quarantine": quarantine_bytes, "free": free_bytes, **space.charges}
        return self._counters.report(
            TierStatistics(
                state=self.state,
                capacity_bytes=space.capacity_bytes,
                used_bytes=space.used_bytes,
                blocks=space.blocks - len(self._quarantined),
                used_by=used_by,
                quarantined_slots=len(self._quarantined),
                message=self._message(),
            )
        )

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._threads.close()
        self._transfers.close()
        if self._commit.close():
            if self._recovery.owed is None:  # else the one that there was, if any, still holds
                self._write_seal()
        else:
            _LOG.warning("the last commit of %s failed: its next start syncs the records again", self._directory.path)
        for slab in self._space.slabs.values():
            slab.close()
        self._directory.close()

    # -- on the I/O threads ------------------------------------------------------------------------------------------

    def _look(self) -> Outcome:
        require_place(self._directory)
        return Outcome(OutcomeKind.DONE)

    def _probe(self) -> Outcome:
        free_bytes = probe_medium(self._directory, list(self._space.slabs.values()))
        self._make_up()
        self._health.note_probe(free_bytes, self._space.growth_bytes)
        return Outcome(OutcomeKind.DONE)

    def _make_up(self) -> None:
        """Make the repair that recovery owes. Raises OSError: then nothing may be written yet."""
        if self._recovery.owed is not None:
            require_place(self._directory)
            self._recovery.make_up()

    def _revealed(self, header: BlockHeader) -> BlockHeader | None:
        """Return what a record says of a block; None when the block is encrypted and its key is not here."""
        if not header.codec & SEALED:
            return header
        key = self._keys.numbered(key_number(header)) if self._keys is not None else None
        return None if key is None else key.reveal(header)

    # -- books -------------------------------------------------------------------------------------------------------

    def _place(self, slot: Slot) -> SlotPlace:
        """Return the place of an allocated slot. Raises RuntimeError when the slot is not allocated."""
        slab = self._space.of(slot)
        return SlotPlace(slab, slab.require_out(slot), slot)

    def _write_seal(self) -> None:
        try:
            failpoints.hit("nvme.seal")
            self._seal.write()
        except OSError as error:  # the medium is gone or full: the next start syncs the slabs
            path, why = self._directory.path / SEAL, error.strerror
            _LOG.warning("%s cannot be written (%s): the next start syncs all slabs, which takes longer", path, why)

    def _message(self) -> str:
        direct = all(slab.file.direct for slab in self._space.slabs.values() if slab.is_made)
        parts = (
            self._health.message,
            "" if direct else "no direct I/O on this file system: blocks are in the page cache too",
            self.recovery_report.sentence(),
        )
        return "; ".join(filter(None, parts))
