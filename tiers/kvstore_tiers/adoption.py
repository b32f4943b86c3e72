"""An arena of a process that has ended, taken over with the blocks that it holds.

Puts together what is believed of its slots (`arena_walk`) and which of them are out. Never knows a capacity, nor what
becomes of the blocks.
Invariant: a slot whose header does not hold is free, without a header, and will have a generation that none had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvstore_tiers.arena import Arena, ArenaRecord, ArenaWitness
from kvstore_tiers.arena_walk import Headers, walk
from kvstore_tiers.base import Slot


@dataclass(frozen=True, slots=True)
class AdoptedArena:
    """What an arena of a former process holds. In `slots[i]` is the block that `headers[i]` names; in `retired` are
    bytes of blocks that are gone. All are allocated; the caller frees those it has no use for."""

    container: int
    slots: list[Slot]
    headers: Headers
    retired: list[Slot]
    damaged_slots: int


def take_over(record: ArenaRecord, descriptor: int, witness: ArenaWitness | None) -> tuple[Arena, AdoptedArena]:
    """Takes the descriptor unless it raises ForeignMemory or OSError."""
    arena = Arena.adopt(record, descriptor, witness)
    handed_out = min(record.handed_out, arena.slots)
    found = walk(arena.address, record.slot_bytes, handed_out, bytes.fromhex(record.owner), record.high_generation)
    generations = dict(zip(found.slots.tolist(), found.headers["generation"].tolist(), strict=True))
    arena.occupy(generations | found.retired, handed_out)

    def slots(of: Mapping[int, int]) -> list[Slot]:
        size = arena.slot_bytes
        return [Slot(arena.number, index * size, size, generation) for index, generation in of.items()]

    return arena, AdoptedArena(arena.number, slots(generations), found.headers, slots(found.retired), found.damaged)
