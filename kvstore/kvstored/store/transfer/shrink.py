"""Giving memory or space of a tier back until it is below its ceiling: empty containers first, then the one with the
fewest bytes is emptied, and so on.

Owns the loop. Never decides where the ceiling is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from kvstore_tiers.base import ContainerReport
from kvstored.store.transfer.room import Room


class Resizable(Protocol):
    """A tier whose capacity can change while it serves. `used_bytes` may be over the ceiling, never over the
    capacity."""

    @property
    def used_bytes(self) -> int: ...

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def ceiling_bytes(self) -> int: ...

    def set_ceiling(self, nbytes: int) -> None: ...

    def resize(self, capacity_bytes: int) -> None: ...

    def containers(self) -> Sequence[ContainerReport]: ...


async def shrink_to_ceiling(tier: Resizable, room: Room, give_back: Callable[[], Awaitable[bool]]) -> bool:
    """Whether the tier is below its ceiling now; False when what is left is read, written or pinned. `give_back` takes
    one empty container out of the tier, and says False when there is none."""
    tried: set[int] = set()
    while tier.used_bytes > tier.ceiling_bytes:
        if await give_back():
            continue
        left = [each for each in tier.containers() if each.container not in tried]
        if not left:
            return False
        emptiest = min(left, key=lambda each: each.used_slots * each.slot_bytes)
        tried.add(emptiest.container)  # whether or not it works: slots in limbo keep a container
        await room.vacate(emptiest.container)
        await asyncio.sleep(0)
    return True
