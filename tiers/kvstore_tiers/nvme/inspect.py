"""Reports on an NVMe directory: one slot, one block, or all that is known of a key.

Owns the reports; changes nothing and takes no lock. On a directory that a daemon uses it
reports that (`holder_pid`): what is written meanwhile may look torn. Token ids are the conversation in
clear text: they are counted, never shown; payload is verified, never shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, payload_checksum, read_header
from kvstore_proto.identity import KEY_BYTES, NO_PARENT
from kvstore_proto.lock_holder import lock_holder
from kvstore_tiers.codecs import codec_name
from kvstore_tiers.nvme.check_slab import judge_slot, read_records
from kvstore_tiers.nvme.directory import LOCK
from kvstore_tiers.nvme.directory_files import slab_numbers, slab_path
from kvstore_tiers.nvme.layout import RECORD_BYTES, RecordState, Superblock, record_header, record_holds
from kvstore_tiers.nvme.slab_file import find_superblock, read_pages

MIN_DIGITS = 6
_RECORDS_A_READ = 16_384
Fields = dict[str, object]


class NotThere(Exception):
    """An error: the slot, block or key that was asked for is not in the NVMe directory. The message says what the
    directory has.
    """


class NotAKey(NotThere):
    """An error: a text that was given as a key, or as the beginning of a key, cannot be one."""


@dataclass
class Report:
    """The facts about one slot, block or key of an NVMe directory, for people to read. `facts` are about the block or
    key as a whole; `slots` has a dictionary of facts for each slot.
    """

    facts: Fields = field(default_factory=dict)
    slots: list[Fields] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _RecordPlace:
    """A record that was written once, and its place."""

    slab: int
    slot: int
    record: bytes
    is_sound: bool


class Inspector:
    """A reader of the NVMe directory at `path` that reports on slots, blocks and keys and changes nothing. `holder_pid`
    is the process number of the daemon that uses the directory, 0 if none does.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.holder_pid = lock_holder(path / LOCK)
        self._slabs = path / "slabs"

    def slot(self, number: int, index: int) -> Report:
        """Return all facts about slot number `index` of the slab `number`. Raises NotThere or OSError."""
        superblock = self._superblock(number)
        if not 0 <= index < superblock.slots:
            raise NotThere(f"slab {number} has the slots 0 to {superblock.slots - 1}, not {index}")
        with open(self._path(number), "rb", buffering=0) as file:
            raw, _, used = read_records(file.fileno(), superblock, index, 1)
            sound = record_holds(raw, superblock.record_seed(index))
            fields = self._describe(file.fileno(), superblock, _RecordPlace(number, index, raw, sound), bool(used[0]))
        return Report(self._about(), [fields])

    def block(self, digits: str) -> Report:
        """Return the facts about the stored block whose key begins with the hex `digits`: record, slot, checksums,
        parent and children. Raises NotThere, also if several keys match.
        """
        key = self._resolve(digits)
        places = [place for place in self._places() if _names(place, key, RecordState.LIVE)]
        if not places:
            raise NotThere(f"block {key.hex()} is not stored here; `inspect DIR key {key.hex()}` shows what is known")
        parent = record_header(places[-1].record).parent
        children, stored = [], parent == NO_PARENT
        for place in self._places():
            if place.is_sound and place.record[6] == RecordState.LIVE:
                header = record_header(place.record)
                stored = stored or header.key == parent
                if header.parent == key:
                    children.append(header.key.hex())
        facts = self._about()
        facts["key"] = key.hex()
        facts["parent"] = "none: it is the first of its chain" if parent == NO_PARENT else parent.hex()
        if parent != NO_PARENT:
            facts["parent stored"] = stored
        facts["children"] = sorted(children)
        return Report(facts, [self._described(place) for place in places])

    def key(self, digits: str, *, every_slot: bool = False) -> Report:
        """Return every record, in any state, of the key that begins with the hex `digits`. With `every_slot` free slots
        are searched as well, for old bytes of the block. Raises NotThere or NotAKey."""
        key = self._resolve(digits, every_slot=every_slot)
        report = Report(self._about())
        report.facts["key"] = key.hex()
        for place in self._places():
            if _names(place, key):
                report.slots.append(self._described(place))
        known = {(fields["slab"], fields["slot"]) for fields in report.slots}
        if every_slot:
            for number, index, header in self.headers():
                if header.key == key and (number, index) not in known:
                    report.slots.append({**_where(self._path(number), number, index), **_header_fields(header)})
                    report.slots[-1]["state"] = "old bytes: no record names them, the slot is free"
        report.facts["stored"] = any(_is_live(fields) for fields in report.slots)
        return report

    # Scanning

    def _places(self) -> Iterator[_RecordPlace]:
        """Yield every record that was ever written, slab by slab."""
        for number in self._numbers():
            with suppress(NotThere), open(self._path(number), "rb", buffering=0) as file:
                superblock = self._superblock(number)
                for first in range(0, superblock.slots, _RECORDS_A_READ):
                    raw, _, used = read_records(file.fileno(), superblock, first, _RECORDS_A_READ)
                    for position in np.flatnonzero(used).tolist():
                        record = raw[position * RECORD_BYTES : (position + 1) * RECORD_BYTES]
                        sound = record_holds(record, superblock.record_seed(first + position))
                        yield _RecordPlace(number, first + position, record, sound)

    def headers(self) -> Iterator[tuple[int, int, BlockHeader]]:
        """Yield every slot header that is valid, regardless of its record."""
        for number in self._numbers():
            with suppress(NotThere), open(self._path(number), "rb", buffering=0) as file:
                superblock = self._superblock(number)
                for index in range(superblock.slots):
                    header = read_header(read_pages(file.fileno(), HEADER_BYTES, superblock.slot_offset(index)))
                    if not isinstance(header, str):
                        yield number, index, header

    def _resolve(self, digits: str, *, every_slot: bool = False) -> bytes:
        """Return the key that begins with these hex digits. Raises NotAKey, or NotThere when no key or several keys
        begin with them.
        """
        text = digits.lower()
        if not MIN_DIGITS <= len(text) <= 2 * KEY_BYTES or set(text) - set("0123456789abcdef"):
            raise NotAKey(f"a key is {2 * KEY_BYTES} hex digits, or its first {MIN_DIGITS} or more, not {digits!r}")
        if len(text) == 2 * KEY_BYTES:
            return bytes.fromhex(text)
        keys = {record_header(place.record).key for place in self._places() if place.is_sound}
        if every_slot:
            keys |= {header.key for _, _, header in self.headers()}
        found = sorted(key.hex() for key in keys if key.hex().startswith(text))
        if len(found) == 1:
            return bytes.fromhex(found[0])
        if found:
            raise NotThere(f"{text} begins {len(found)} keys ({', '.join(found[:4])}): give more digits")
        raise NotThere(f"no record names a key that begins with {text}")

    # Describing

    def _about(self) -> Fields:
        holder = f"process {self.holder_pid}" if self.holder_pid > 0 else "another process"
        live = f"in use by {holder}: read beside it, what changes meanwhile may look torn"
        return {"directory": str(self.path), "state": live if self.holder_pid else "in use by no daemon"}

    def _described(self, place: _RecordPlace) -> Fields:
        with open(self._path(place.slab), "rb", buffering=0) as file:
            return self._describe(file.fileno(), self._superblock(place.slab), place, True)

    def _describe(self, fd: int, superblock: Superblock, place: _RecordPlace, used: bool) -> Fields:
        fields = _where(self._path(place.slab), place.slab, place.slot)
        fields["file offset"] = superblock.slot_offset(place.slot)
        fields["slot bytes"] = superblock.slot_bytes
        if not used:
            return fields | {"state": "free: never used"}
        if not place.is_sound:
            return fields | {"state": "unknown: the record does not hold", **_slot_fields(fd, superblock, place.slot)}
        named, state = record_header(place.record), place.record[6]
        names = {state.value: state.name.lower() for state in RecordState}
        fields["state"] = names.get(state, f"{state}, which means nothing")
        if state == RecordState.FREE:
            fields["state"] = "free"
            return fields | {"generation": named.generation, **_slot_fields(fd, superblock, place.slot)}
        if state == RecordState.QUARANTINED and self.holder_pid:
            fields["reason"] = "ask the daemon: kvctl quarantine list"
        fields["commit"] = int.from_bytes(place.record[16:24], "little")
        fields |= _header_fields(named)
        fault = judge_slot(fd, superblock, place.slot, place.record, verify_payload=True)
        fields["verified"] = "header and payload hold" if fault is None else f"FAILED: {fault[1]}"
        slot = _slot_fields(fd, superblock, place.slot)
        fields["tokens"] = slot.get("tokens", "unknown")
        return fields

    # Files

    def _numbers(self) -> list[int]:
        return slab_numbers(self._slabs)

    def _path(self, number: int) -> Path:
        return slab_path(self._slabs, number)

    def _superblock(self, number: int) -> Superblock:
        path = self._path(number)
        if not path.exists():
            known = ", ".join(map(str, self._numbers())) or "none"
            raise NotThere(f"there is no slab {number}; there are: {known}")
        superblock = find_superblock(path)
        if isinstance(superblock, str):
            raise NotThere(f"slab {number} cannot be read: {superblock}")
        return superblock


def _names(place: _RecordPlace, key: bytes, *states: RecordState) -> bool:
    if not place.is_sound or (states and place.record[6] not in states):
        return False
    return record_header(place.record).key == key


def _is_live(fields: Fields) -> bool:
    return fields["state"] == "live"


def _where(path: Path, slab: int, slot: int) -> Fields:
    return {"slab": slab, "slot": slot, "file": str(path)}


def _header_fields(header: BlockHeader) -> Fields:
    return {
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "tenant": header.tenant.hex(),
        "fingerprint": header.fingerprint.hex(),
        "group": header.group,
        "depth": header.depth,
        "generation": header.generation,
        "payload bytes": header.payload_bytes,
        "checksum": f"{header.checksum:016x}",
        "codec": codec_name(header.codec),
        "stored bytes": header.stored_bytes,
        "created ns": header.created_ns,
    }


def _slot_fields(fd: int, superblock: Superblock, index: int) -> Fields:
    """Return what the slot itself holds, regardless of its record."""
    offset = superblock.slot_offset(index)
    header = read_header(read_pages(fd, HEADER_BYTES, offset))
    if isinstance(header, str):
        return {"slot holds": header}
    nbytes = min(header.stored_bytes, superblock.slot_bytes - HEADER_BYTES)
    holds = payload_checksum(read_pages(fd, nbytes, offset + HEADER_BYTES)) == header.stored_checksum
    what = f"block {header.key.hex()} generation {header.generation}, its payload {'holds' if holds else 'is damaged'}"
    return {"slot holds": what, "tokens": len(header.tokens) // 4}
