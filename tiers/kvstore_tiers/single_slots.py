"""Room of a tier that does not give it out by containers: each slot is a container by itself, of any size.

Owns which slots are taken, and that a place that is used again has a higher generation. Never checks a size.
Invariant: the slots that are taken never exceed the capacity.
"""

from __future__ import annotations

from kvstore_tiers.image import Slot


class SingleSlots:
    """`capacity_bytes` of them, in containers numbered after `last_number`; `len` is how many are taken."""

    def __init__(self, capacity_bytes: int, last_number: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._taken: dict[int, Slot] = {}  # by container
        self._free: dict[int, list[Slot]] = {}  # by size
        self._containers = last_number

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, nbytes: int) -> Slot | None:
        """A slot of this size, or None when there is no room."""
        if self.used_bytes + nbytes > self.capacity_bytes:
            return None
        free = self._free.get(nbytes)
        if free:
            former = free.pop()
            slot = former._replace(generation=former.generation + 1)
        else:
            self._containers += 1
            slot = Slot(self._containers, 0, nbytes, 1)
        self._taken[slot.container] = slot
        self.used_bytes += nbytes
        return slot

    def free(self, slot: Slot) -> None:
        """Raises RuntimeError when it is not taken."""
        if self._taken.get(slot.container) != slot:
            raise RuntimeError(f"{slot} is freed but not allocated")
        del self._taken[slot.container]
        self._free.setdefault(slot.nbytes, []).append(slot)
        self.used_bytes -= slot.nbytes
