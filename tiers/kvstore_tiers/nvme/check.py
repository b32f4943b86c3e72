"""Checks every invariant of an NVMe directory: format, files, slabs, records, slots, chains, capacity.

Judges; repair.py repairs. Reads a directory that no tier has open (it takes the lock itself); `kvstored check` and the
tests' teardown. Memory: about 400 bytes a block.

| what | is compared with |
|---|---|
| files of the directory | the list in docs/format.md; anything else is stray |
| superblocks | each other, the file's name, the file's length |
| records | their checksum and place; generation and sequence; one live record a key |
| slots | the record's key, generation, length, checksum, parent, tenant, fingerprint; if asked, their payload |
| parents | stored or not: blocks behind a missing one are orphans; a chain must not close on itself |
| all files together | the capacity, if it is given |
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path

from kvstore_proto.identity import NO_PARENT
from kvstore_proto.state_identity import IDENTITY_FILE
from kvstore_tiers.nvme.check_slab import (
    FindingKind,
    Live,
    LiveBlock,
    Progress,
    Severity,
    SlabFinding,
    SlabWalk,
    damage,
    leftover,
    note,
)
from kvstore_tiers.nvme.directory import SEAL, TierDirectory, read_format, version_text

__all__ = ["SlabFinding", "FindingKind", "Severity", "check_directory", "walk"]

_EXPECTED = {"lock", "format", "slabs", SEAL, IDENTITY_FILE}
_TEMPORARY = {"format.new", f"{IDENTITY_FILE}.new", f"{SEAL}.new", "slabs/probe.new"}
_MAX_NAMED = 3  # keys that one finding names


def check_directory(
    directory: str | os.PathLike[str],
    *,
    capacity_bytes: int | None = None,
    verify_payloads: bool = False,
    notes: bool = False,
    progress: Progress = lambda nbytes: None,
) -> list[SlabFinding]:
    """Check the files of the NVMe tier in `directory` and return everything that is wrong; an empty list if all is
    well. With `capacity_bytes` it checks that the files do not exceed this capacity. With `verify_payloads` it reads
    every stored block and compares its checksum. With `notes` it adds remarks that are no faults. `progress` is called
    with the number of bytes after each read. Raises DirectoryInUse while a tier has the directory open,
    FormatUnsupported if another version's format is found.
    """
    with closing(TierDirectory(directory, create=False)) as opened:
        findings = walk(opened, capacity_bytes=capacity_bytes, verify_payloads=verify_payloads, progress=progress)
        return [finding for finding in findings if notes or finding.severity is not Severity.NOTE]


def walk(
    directory: TierDirectory,
    *,
    capacity_bytes: int | None = None,
    verify_payloads: bool = False,
    progress: Progress = lambda nbytes: None,
) -> Iterator[SlabFinding]:
    """Yield the findings of `check_directory` one by one, for a caller that already holds the lock of `directory`. The
    parameters are the same.
    """
    yield from _walk_files(directory)
    live: Live = {}
    quarantined: list[tuple[int, int]] = []
    for number in directory.numbers():
        slab = SlabWalk(directory.slab_path(number), number, live, verify_payloads=verify_payloads, progress=progress)
        yield from slab.run()
        quarantined += [(number, index) for index in slab.quarantined]
    yield from _walk_keys(live)
    yield from _walk_chains(live)
    for number, index in quarantined:
        where = f"{directory.slab_path(number)} slot {index}"
        yield note(FindingKind.QUARANTINED, where, "in quarantine: out of use, its bytes kept", number, index)
    if capacity_bytes is not None:
        used_bytes = bytes_used(directory)
        if used_bytes > capacity_bytes:
            what = f"{used_bytes} bytes are used, the capacity is {capacity_bytes}"
            yield damage(FindingKind.CAPACITY, directory.path, what)


def bytes_used(directory: TierDirectory) -> int:
    """Return the bytes of the slab files in `directory`, finished, unfinished and damaged, which count against the
    tier's capacity.
    """
    files = [directory.slab_path(n, suffix) for suffix in ("slab", "new", "damaged") for n in directory.numbers(suffix)]
    return sum(path.stat().st_size for path in files)


def stray_files(directory: TierDirectory) -> list[Path]:
    """Return the files in `directory` that no version of the tier makes. The tier never touches or counts them."""
    slabs = {
        directory.slab_path(number, suffix)
        for suffix in ("slab", "new", "damaged")
        for number in directory.numbers(suffix)
    }
    known = slabs | {directory.path / name for name in _EXPECTED | _TEMPORARY}
    folders = (directory.path, directory.slabs)
    found = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
    return sorted(path for path in found if path not in known)


def temporary_files(directory: TierDirectory) -> list[Path]:
    """Return the temporary files that a crash left in `directory` while another file was being replaced."""
    return [path for name in sorted(_TEMPORARY) if (path := directory.path / name).exists()]


def _walk_files(directory: TierDirectory) -> Iterator[SlabFinding]:
    numbers = directory.numbers()
    format_path = directory.path / "format"
    written = version_text(format_path)
    if written and read_format(written) is None:
        yield leftover(FindingKind.FORMAT_MISSING, format_path, "what it says cannot be read")
    elif numbers and not written:
        yield leftover(FindingKind.FORMAT_MISSING, format_path, "the format's version is not written down")
    for path in temporary_files(directory):
        yield leftover(FindingKind.TEMPORARY, path, "an atomic replacement that was never finished")
    for number in directory.numbers("new"):
        path = directory.slab_path(number, "new")
        yield leftover(FindingKind.UNFINISHED_SLAB, path, "a slab file that was never finished", number)
    for number in directory.numbers("damaged"):
        path = directory.slab_path(number, "damaged")
        yield damage(FindingKind.PUT_ASIDE, path, "a slab file without a superblock", number)
    for path in stray_files(directory):
        yield note(FindingKind.STRAY, path, "not a file of kvstored; no capacity counts it")


def _walk_keys(live: Live) -> Iterator[SlabFinding]:
    for key, blocks in live.items():
        if len(blocks) > 1:
            unsure = len({block.sequence for block in blocks}) < len(blocks)
            what = f"{len(blocks)} records name this block"
            if unsure:
                yield damage(
                    FindingKind.DUPLICATE, key.hex(), f"{what}, two of one commit: nothing says which is newer"
                )
            else:
                yield leftover(FindingKind.DUPLICATE, key.hex(), what)


def _walk_chains(live: Live) -> Iterator[SlabFinding]:
    """Yield findings for chains that close on themselves, and for blocks that cannot be reached because a block before
    them is not stored.
    """
    parents = {key: newest(blocks).parent for key, blocks in live.items()}
    reached: dict[bytes, bool] = {NO_PARENT: True}
    heads: list[bytes] = []
    for key in parents:
        chain: dict[bytes, None] = {}
        ancestor = key
        while ancestor not in reached and ancestor in parents and ancestor not in chain:
            chain[ancestor] = None
            ancestor = parents[ancestor]
        if ancestor in chain:
            at = newest(live[ancestor])
            yield damage(FindingKind.CYCLE, ancestor.hex(), "its chain closes on itself", at.slab, at.slot)
            reached[ancestor] = False
        elif ancestor not in reached and chain:
            heads.append(next(reversed(chain)))
        verdict = reached.get(ancestor, False)
        reached.update(dict.fromkeys(chain, verdict))
    orphans = sum(not reached[key] for key in parents)
    if orphans:
        named = ", ".join(head.hex() for head in heads[:_MAX_NAMED]) + (", ..." if len(heads) > _MAX_NAMED else "")
        what = f"{orphans} blocks cannot be reached until one before them is stored again; behind it: {named}"
        yield note(FindingKind.ORPHANS, "chains", what)


def newest(blocks: Iterable[LiveBlock]) -> LiveBlock:
    """Return the block with the highest sequence number (the commit that wrote its record). `blocks` are all records of
    one key; recovery keeps the returned one.
    """
    return max(blocks, key=lambda block: block.sequence)
