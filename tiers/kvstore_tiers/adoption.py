"""An arena of a process that has ended, taken over with its blocks.

The module decides which slots' headers are believed, reading them as one table: a header must be whole, name the
arena's owner and fit its slot. A header is written after its payload, so a valid one vouches for the bytes behind it.
It reads no payload, and knows no capacity, nor what happens to the blocks. Invariants: a slot with an invalid header is
free, without a header, and will have a generation that none had before; retired slots are listed apart, since a reader
of the ended process may still look at them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_proto.arena import HEADER_BYTES, MAGIC, MAX_TOKENS, VERSION
from kvstore_tiers.arena import Arena, ArenaRecord, ArenaWitness
from kvstore_tiers.base import Slot
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
        ("codec", "<u2"),
        ("tokens", "<u4"),
        ("payload_bytes", "<u8"),
        ("generation", "<u8"),
        ("checksum", "<u8"),
        ("created_ns", "<u8"),
        ("depth", "<u4"),
        ("error", "<f4"),
        ("header_checksum", "<u8"),
        ("reserved3", "V16"),
        ("kept", "<u8"),
    ]
)
assert HEADER.itemsize == 184
_MAX_GENERATION = (1 << 32) - 1  # the residency index keeps it in 32 bits
Headers = npt.NDArray[np.void]


class HeaderScan(NamedTuple):
    """The result of reading the block headers in one arena (shared memory cut into slots). `headers[i]` is the header
    (184 bytes, dtype `HEADER`) of the block in slot number `slots[i]`. `retired` has, by slot number, the generation of
    each slot whose block is gone. `damaged` is the number of headers that begin like a header but fail a check.
    """

    slots: npt.NDArray[np.int64]
    headers: Headers
    retired: dict[int, int]
    damaged: int


def walk(address: int, slot_bytes: int, slots: int, owner: bytes, max_generation: int) -> HeaderScan:
    """Read the block headers of the first `slots` slots, of `slot_bytes` bytes each, of the arena memory at `address`.
    A header is accepted only if its checksum is right, its tenant is the 16-byte `owner`, its sizes fit the slot and
    its generation is at most `max_generation`. Damaged headers raise nothing; they are counted in the result.
    """
    if not slots:
        return HeaderScan(np.zeros(0, np.int64), np.zeros(0, HEADER), {}, 0)
    memory = view_at(address, slots * slot_bytes).reshape(slots, slot_bytes)
    headers: Headers = np.ascontiguousarray(memory[:, : HEADER.itemsize]).view(HEADER).reshape(slots)
    begun = np.flatnonzero(headers["magic"] == MAGIC)
    found = headers[begun]
    fits = (
        (found["version"] == VERSION)
        & (found["flags"] <= int.from_bytes(RETIRED, "little"))
        & (found["tenant"] == np.frombuffer(owner, "V16")[0])
        & (found["codec"] == 0)  # clients read these slots in place
        & np.isfinite(found["error"])
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
    return HeaderScan(
        begun[blocks],
        found[blocks],
        dict(zip(begun[retired].tolist(), found["generation"][retired].tolist(), strict=True)),
        int(np.count_nonzero(headers["magic"] == MAGIC)) - int(np.count_nonzero(holds)),
    )


def _checksum(page: npt.NDArray[np.uint8]) -> int:
    """Return the right value of the header's checksum field: xxh3_64 of the page with that field, and the retired flag,
    zero.
    """
    raw = bytearray(page.data)
    raw[152:160] = bytes(8)
    raw[6:8] = bytes(2)
    return xxhash.xxh3_64_intdigest(raw)


class AdoptedArena(NamedTuple):
    """The blocks that were found in an arena (shared memory cut into slots) of a process that has ended. The block with
    the header `headers[i]` is in `slots[i]`. The slots in `retired` have bytes of blocks that are gone. All these slots
    are allocated; the caller frees each one that it does not need. `damaged_slots` is the number of slots with an
    invalid header.
    """

    container: int
    slots: list[Slot]
    headers: Headers
    retired: list[Slot]
    damaged_slots: int


def take_over(record: ArenaRecord, descriptor: int, witness: ArenaWitness | None) -> tuple[Arena, AdoptedArena]:
    """Map the arena that `record` describes from its `descriptor`, and find its blocks. Return the arena and its
    blocks. `witness` is notified of later changes to the arena. Raises ForeignMemory if the descriptor is not of this
    arena, and OSError if it cannot be mapped; after an error the caller still has to close the descriptor.
    """
    arena = Arena.adopt(record, descriptor, witness)
    handed_out = min(record.handed_out, arena.slots)
    found = walk(arena.address, record.slot_bytes, handed_out, bytes.fromhex(record.owner), record.high_generation)
    generations = dict(zip(found.slots.tolist(), found.headers["generation"].tolist(), strict=True))
    arena.occupy(generations | found.retired, handed_out)

    def slots(of: Mapping[int, int]) -> list[Slot]:
        size = arena.slot_bytes
        return [Slot(arena.number, index * size, size, generation) for index, generation in of.items()]

    return arena, AdoptedArena(arena.number, slots(generations), found.headers, slots(found.retired), found.damaged)
