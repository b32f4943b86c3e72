"""What can be wrong in an NVMe directory: a closed list, and how bad each is.

Owns the vocabulary that the walker (check.py) and the repair (repair.py) share. Judges nothing.
`damage`: bytes are wrong. `leftover`: a crash left something that the next start clears up. `note`: worth knowing, and
nothing is wrong. After a clean close there are only notes; after a crash there is no damage.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Severity(Enum):
    NOTE = "note"
    LEFTOVER = "leftover"
    DAMAGE = "damage"


class Kind(Enum):
    """What was found. The names are part of `--json`."""

    FORMAT_MISSING = "format-missing"
    TEMPORARY = "temporary-file"
    STRAY = "stray-file"
    UNFINISHED_SLAB = "unfinished-slab"
    PUT_ASIDE = "slab-put-aside"
    SUPERBLOCK = "superblocks-lost"
    SUPERBLOCK_COPY = "superblock-copy"
    WRONG_NUMBER = "wrong-slab-number"
    GEOMETRY = "geometry"
    TRUNCATED = "truncated"
    TOO_LONG = "too-long"
    RECORD = "record"
    GENERATION = "generation"
    SEQUENCE = "sequence"
    HEADER = "header"
    PAYLOAD = "payload"
    DUPLICATE = "duplicate-key"
    CYCLE = "cycle"
    ORPHANS = "orphans"
    QUARANTINED = "quarantined"
    CAPACITY = "capacity"


@dataclass(frozen=True, slots=True)
class Finding:
    """`slab` and `slot` name the slot it is about, -1 where it is about none."""

    severity: Severity
    where: str
    what: str
    kind: Kind
    slab: int = -1
    slot: int = -1

    def __str__(self) -> str:
        return f"{self.severity.value}: {self.where}: {self.what}"


def damage(kind: Kind, where: object, what: str, slab: int = -1, slot: int = -1) -> Finding:
    return Finding(Severity.DAMAGE, str(where), what, kind, slab, slot)


def leftover(kind: Kind, where: object, what: str, slab: int = -1, slot: int = -1) -> Finding:
    return Finding(Severity.LEFTOVER, str(where), what, kind, slab, slot)


def note(kind: Kind, where: object, what: str, slab: int = -1, slot: int = -1) -> Finding:
    return Finding(Severity.NOTE, str(where), what, kind, slab, slot)
