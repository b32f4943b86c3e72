"""Repair of an NVMe directory: each finding of the walker is repaired, or reported as beyond repair.

Owns the order of the repair, and a sentence for each thing done. It repairs the frame of the directory itself (names
and lengths of slab files, halves of replacements) and leaves the rest to the tier, opened as a daemon opens it:
recovery withdraws records, `quarantine` takes blocks that fail verification out of use. So a repaired directory is what
the daemon itself would have made of it, with payloads verified if asked. Invariants: a block that verifies is never
given up, except the older one of two records with one key; no byte of a file without geometry is touched (the
file is put aside); a second repair finds nothing to do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from kvstore_proto.replaced_file import sync_directory
from kvstore_tiers.base import Outcome
from kvstore_tiers.nvme.check import check_directory, temporary_files
from kvstore_tiers.nvme.check_slab import FindingKind, Progress, SlabFinding
from kvstore_tiers.nvme.directory import TierDirectory
from kvstore_tiers.nvme.slab_file import find_superblock
from kvstore_tiers.nvme.tier import NvmeTier

_REPAIRED_BY = {
    FindingKind.FORMAT_MISSING: "write the format's version",
    FindingKind.TEMPORARY: "delete it",
    FindingKind.UNFINISHED_SLAB: "delete it",
    FindingKind.SUPERBLOCK: "put the file aside as .damaged: without a superblock its records mean nothing",
    FindingKind.GEOMETRY: "put the file aside as .damaged: its slots overlap",
    FindingKind.WRONG_NUMBER: "give the file the name that its superblock says, "
    "or put it aside as .damaged if that is taken",
    FindingKind.TRUNCATED: "withdraw the blocks behind the end and give the file its length back",
    FindingKind.TOO_LONG: "cut the file to its length",
    FindingKind.SUPERBLOCK_COPY: "write it again from the one that holds",
    FindingKind.RECORD: "withdraw the record: its slot is free, its block will be computed again",
    FindingKind.GENERATION: "quarantine the slot, its block will be computed again",
    FindingKind.SEQUENCE: "quarantine the slot, its block will be computed again",
    FindingKind.HEADER: "quarantine the slot, its block will be computed again",
    FindingKind.PAYLOAD: "quarantine the slot, its block will be computed again",
    FindingKind.CYCLE: "quarantine the slot: no client can have stored this",
    FindingKind.DUPLICATE: "keep the newest record, withdraw the others",
    FindingKind.CAPACITY: "delete the slabs with the fewest bytes until the rest fits",
}
_CANNOT = {
    FindingKind.PUT_ASIDE: "cannot be repaired: look at it or delete it by hand; "
    "until then it counts against the capacity",
    FindingKind.CAPACITY: "cannot be repaired: files put aside take the room; delete them by hand",
}
_SUSPECT = {FindingKind.GENERATION, FindingKind.SEQUENCE, FindingKind.HEADER, FindingKind.PAYLOAD, FindingKind.CYCLE}
_BOUNDLESS = 1 << 62  # a capacity under which nothing is given up


@dataclass
class RepairReport:
    """The result of a repair of an NVMe directory. `found` has the faults before the repair. `done` has a line for each
    thing that was done (in a dry run: that would be done). `left` has each fault that remains, with the reason.
    """

    found: list[SlabFinding] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    left: list[tuple[SlabFinding, str]] = field(default_factory=list)


def repair_directory(
    directory: str | os.PathLike[str],
    *,
    capacity_bytes: int | None = None,
    verify_payloads: bool = False,
    dry_run: bool = False,
    progress: Progress = lambda nbytes: None,
) -> RepairReport:
    """Check the NVMe tier's `directory`, repair the faults, and check it again. With `dry_run` nothing is changed.
    `capacity_bytes`, `verify_payloads` and `progress` are explained at `check_directory`. Raises DirectoryInUse while a
    daemon has it open, FormatUnsupported for another format, DirectoryUnusable if the medium cannot be written."""
    check = partial(
        check_directory, directory, capacity_bytes=capacity_bytes, verify_payloads=verify_payloads, progress=progress
    )
    report = RepairReport(found=check())
    wanted = [finding for finding in report.found if finding.kind in _REPAIRED_BY]
    report.left = [(finding, _why_left(finding)) for finding in report.found if finding.kind not in _REPAIRED_BY]
    if dry_run or not wanted:
        report.done = [_sentence("would", finding) for finding in wanted]
        return report
    with closing(TierDirectory(directory)) as opened:
        opened.keep_format()  # the walk has read every superblock
        _repair_frame(opened, wanted)
        over = any(finding.kind is FindingKind.CAPACITY for finding in wanted)
        room_bytes = capacity_bytes if over and capacity_bytes else _BOUNDLESS
    with closing(NvmeTier.open(directory, room_bytes, io_threads=1)) as tier:
        report.done = [*_repair_slots(tier, wanted)]
    _give_to_owner(Path(directory))
    left = check()
    still = {(finding.kind, finding.where) for finding in left}
    repaired = [finding for finding in wanted if (finding.kind, finding.where) not in still]
    report.done = [_sentence("did", finding) for finding in repaired] + report.done
    report.left = [(finding, _why_left(finding)) for finding in left]
    return report


def _sentence(verb: str, finding: SlabFinding) -> str:
    return f"{finding.where}: {finding.what}: {verb} {_REPAIRED_BY[finding.kind]}"


def _why_left(finding: SlabFinding) -> str:
    return _CANNOT.get(finding.kind, "cannot be repaired: the medium did not take the repair; look at the system's log")


def _repair_frame(directory: TierDirectory, wanted: Sequence[SlabFinding]) -> None:
    """Repair the names, lengths and leftovers of files, which the tier does not look at when it opens."""
    for path in temporary_files(directory):
        path.unlink()
    for finding in wanted:
        path = directory.slab_path(finding.slab)
        if finding.kind is FindingKind.TOO_LONG:
            superblock = find_superblock(path)
            if not isinstance(superblock, str):
                os.truncate(path, superblock.file_bytes)
        elif finding.kind is FindingKind.GEOMETRY:
            directory.put_aside(finding.slab)
        elif finding.kind is FindingKind.WRONG_NUMBER:
            superblock = find_superblock(path)
            named = -1 if isinstance(superblock, str) else superblock.number
            right = directory.slab_path(named)
            if named >= 0 and not right.exists():
                path.rename(right)
            else:
                directory.put_aside(finding.slab)
    if directory.slabs.is_dir():
        sync_directory(directory.slabs)


def _repair_slots(tier: NvmeTier, wanted: Sequence[SlabFinding]) -> Iterator[str]:
    """Quarantine the slots that failed verification, as far as quarantine has room, and make that durable."""
    suspect: dict[tuple[int, int], SlabFinding] = {}
    for finding in (finding for finding in wanted if finding.kind in _SUSPECT):
        superblock = find_superblock(tier.path / "slabs" / f"{finding.slab:08d}.slab")
        if not isinstance(superblock, str):
            suspect[finding.slab, superblock.slot_offset(finding.slot)] = finding
    found = [(slot, header) for slot, header in tier.recover() if (slot.container, slot.offset) in suspect]
    for slot, header in found:
        finding = suspect[slot.container, slot.offset]
        tier.quarantine(slot, finding.what)
        kept = "kept for inspection" if slot in tier.quarantined() else "freed, quarantine is full"
        yield f"{finding.where}: block {header.key.hex()}: its bytes are {kept}"
    _sync(tier)


def _sync(tier: NvmeTier) -> None:
    outcomes: list[Outcome] = []
    synced = threading.Event()

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        synced.set()

    tier.sync(done)
    synced.wait()
    if not outcomes[0].ok:
        raise OSError(outcomes[0].errno, f"the repair could not be made durable: {outcomes[0].message}")


def _give_to_owner(directory: Path) -> None:
    """Give the new files to the owner of the directory: root made the repair, and the daemon's user must be able to
    open them.
    """
    if os.geteuid():
        return
    owner = directory.stat()
    for path in (directory, *directory.rglob("*")):
        status = path.lstat()
        if (status.st_uid, status.st_gid) != (owner.st_uid, owner.st_gid):
            os.chown(path, owner.st_uid, owner.st_gid, follow_symlinks=False)
