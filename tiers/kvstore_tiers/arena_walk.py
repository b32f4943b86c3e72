"""Which blocks are in an arena that another process filled: its slots' headers, read as one table.

Owns what is believed of a header: it must be whole, name the arena's owner and fit its slot. A header is written after
its payload, so one that holds vouches for the bytes behind it. Never reads a payload, never changes a byte.
Invariants: a slot whose header does not hold in every respect is no block; retired slots are listed apart, since a
reader of the process that ended may still be looking at it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_proto.arena import HEADER_BYTES, MAGIC, MAX_TOKENS, VERSION
from kvstore_tiers.image import RETIRED
from kvstore_tiers.segments import view_at

HEADER = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("flags", "<u2"),
        ("key", "V16"),
        ("parent", "V16"),
        ("extra", "V16"),
        ("fingerprint", "V32"),
        ("tenant", "V16"),
        ("group", "<u2"),
        ("reserved", "<u2"),
        ("tokens", "<u4"),
        ("payload_bytes", "<u8"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("created_ns", "<u8"),
        ("depth", "<u4"),
        ("reserved2", "<u4"),
        ("header_checksum", "<u8"),
    ]
)
assert HEADER.itemsize == 160
_MAX_GENERATION = (1 << 32) - 1  # the residency index keeps it in 32 bits
Headers = npt.NDArray[np.void]


@dataclass(frozen=True, slots=True)
class Walk:
    """`headers[i]` is the header of slot `slots[i]`, for blocks; `retired` are slots whose block is gone, with their
    generations; `damaged` counts headers that began like one and do not hold."""

    slots: npt.NDArray[np.int64]
    headers: Headers
    retired: dict[int, int]
    damaged: int


def walk(address: int, slot_bytes: int, slots: int, owner: bytes, max_generation: int) -> Walk:
    """The first `slots` slots of `slot_bytes` at `address`, whose blocks must be those of the tenant `owner`."""
    if not slots:
        return Walk(np.zeros(0, np.int64), np.zeros(0, HEADER), {}, 0)
    memory = view_at(address, slots * slot_bytes).reshape(slots, slot_bytes)
    headers: Headers = np.ascontiguousarray(memory[:, : HEADER.itemsize]).view(HEADER).reshape(slots)
    begun = np.flatnonzero(headers["magic"] == MAGIC)
    found = headers[begun]
    fits = (
        (found["version"] == VERSION)
        & (found["flags"] <= int.from_bytes(RETIRED, "little"))
        & (found["tenant"] == np.frombuffer(owner, "V16")[0])
        & (found["payload_bytes"] <= slot_bytes - HEADER_BYTES)
        & (found["tokens"] <= MAX_TOKENS)
        & (found["generation"] >= 1)
        & (found["generation"] <= min(max_generation, _MAX_GENERATION))
    )
    begun, found = begun[fits], found[fits]
    sums = found["header_checksum"].tolist()
    holds = np.fromiter(
        (_checksum(memory[slot, :HEADER_BYTES]) == wanted for slot, wanted in zip(begun.tolist(), sums, strict=True)),
        dtype=bool,
        count=len(begun),
    )
    is_retired = found["flags"] != 0
    retired = holds & is_retired
    blocks = holds & ~is_retired
    return Walk(
        begun[blocks],
        found[blocks],
        dict(zip(begun[retired].tolist(), found["generation"][retired].tolist(), strict=True)),
        int(np.count_nonzero(headers["magic"] == MAGIC)) - int(np.count_nonzero(holds)),
    )


def _checksum(page: npt.NDArray[np.uint8]) -> int:
    """What the header's checksum field must say: xxh3_64 of the page with that field, and the retired flag, zero."""
    raw = bytearray(page.data)
    raw[152:160] = bytes(8)
    raw[6:8] = bytes(2)
    return xxhash.xxh3_64_intdigest(raw)
