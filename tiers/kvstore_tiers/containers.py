"""The accounting of a tier's slots: containers, arenas or slabs, each cut into slots of one size for one owner; or
slots one by one, each a container by itself, of any size.

The module owns which slot is handed out next, and the capacity. It does not make a container. Invariants: a container
hands out slots to one owner; none is handed out of a container that is set aside or barred; a place that is used again
has a higher generation; slots one by one never exceed their capacity.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any, Generic, Protocol, TypeVar

from kvstore_tiers.base import ContainerReport, Slot, Tier


class Container(Protocol):
    """A piece of a tier's room (an arena or a slab file) that is cut into slots of `slot_bytes` bytes. `owner` is the
    tenant of all its slots, or "" in a tier that does not separate tenants.
    """

    number: int
    nbytes: int
    owner: str
    slot_bytes: int
    used_slots: int

    @property
    def slots(self) -> int: ...
    @property
    def has_room(self) -> bool: ...
    def allocate(self) -> Slot: ...
    def free(self, slot: Slot) -> object: ...


Of = TypeVar("Of", bound=Container)


class Containers(Generic[Of]):
    """The list of a tier's containers (arenas or slab files), which hands out their slots within `capacity_bytes`
    bytes. At most `ceiling_bytes` of the capacity may be used for now. `charges` has bytes outside the containers, by
    label, that count against it too. `empty` has the containers without a used slot, by number. It is for one thread.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = self.ceiling_bytes = capacity_bytes
        self.charges: Counter[str] = Counter()
        self.nbytes = 0  # of all of them
        self.empty: dict[int, Of] = {}
        self.barred: set[int] = set()  # hand out no slot any more
        self.aside: set[int] = set()  # none for now
        self.with_room: defaultdict[tuple[str, int], list[Of]] = defaultdict(list)  # each container once
        self.by_number: dict[int, Of] = {}

    def __iter__(self) -> Iterator[Of]:
        return iter(self.by_number.values())

    def __getitem__(self, number: int) -> Of:
        return self.by_number[number]

    def get(self, number: int) -> Of | None:
        """Return the container with this number, or None if there is no such container."""
        return self.by_number.get(number)

    def of(self, slot: Slot) -> Of:
        """Return the container (an arena or a slab file) that contains `slot`. Raises RuntimeError if it is unknown."""
        container = self.by_number.get(slot.container)
        if container is None:
            raise RuntimeError(f"{slot} is in no container")
        return container

    @property
    def used_bytes(self) -> int:
        return self.nbytes + self.charges.total()

    @property
    def blocks(self) -> int:
        return sum(container.used_slots for container in self)

    @property
    def blocks_bytes(self) -> int:
        return sum(container.used_slots * container.slot_bytes for container in self)

    def add(self, container: Of) -> None:
        """Add `container` to the list: a new one, or one that was taken over with its blocks."""
        self.by_number[container.number] = container
        self.nbytes += container.nbytes
        if not container.used_slots:
            self.empty[container.number] = container
        elif container.has_room:
            self._list_room(container)

    def remove(self, container: Of) -> None:
        """Remove `container` from the list. Its slots are not handed out any more, and its bytes count no more."""
        self.forget_room(container)
        del self.by_number[container.number]
        self.nbytes -= container.nbytes
        self.empty.pop(container.number, None)
        self.barred.discard(container.number)

    def clear(self) -> None:
        """Remove all containers from the list."""
        for container in list(self):
            self.remove(container)

    def take(self, nbytes: int, owner: str, make: Callable[[], Of | None]) -> Slot | None:
        """Return a free slot of `nbytes` bytes for `owner`. If no container (arena or slab file) has one, `make` is
        called to return a new container cut to this size, or None. Return None if there is no new container either.
        """
        container = self.with_room_for(nbytes, owner, make)
        if container is None:
            return None
        slot = container.allocate()
        self.taken_from(container)
        return slot

    def with_room_for(self, nbytes: int, owner: str, make: Callable[[], Of | None]) -> Of | None:
        """Return a container with a free slot of `nbytes` bytes for `owner`, perhaps one from `make`, as `take` does.
        Call `taken_from` once slots of it were taken.
        """
        candidates = self.with_room[owner, nbytes]
        if not candidates:
            made = make()
            if made is None:
                return None
            candidates.append(made)
        return candidates[-1]

    def taken_from(self, container: Of) -> None:
        """Note that slots of `container`, which `with_room_for` returned, were taken."""
        if not container.has_room:
            self.with_room[container.owner, container.slot_bytes].pop()
        self.empty.pop(container.number, None)

    def give_back(self, slot: Slot) -> Of:
        """Free `slot`, and return the container (an arena or a slab file) that contains it."""
        container = self.of(slot)
        had_room = container.has_room
        container.free(slot)
        if container.number in self.aside or container.number in self.barred:
            return container
        if not had_room:
            self._list_room(container)
        if container.used_slots == 0:
            self.empty[container.number] = container
        return container

    def makes_room(self, number: int, nbytes: int, owner: str) -> bool:
        """Return True if a slot of `nbytes` bytes for `owner` can be taken once a slot of container `number` is freed:
        the container has this size and owner, and is neither set aside nor barred.
        """
        container, is_open = self.by_number[number], number not in self.aside and number not in self.barred
        return is_open and (container.owner, container.slot_bytes) == (owner, nbytes)

    def reports(self) -> list[ContainerReport]:
        """Return a report with the figures of each container."""
        return [ContainerReport(a.number, a.owner, a.nbytes, a.slot_bytes, a.slots, a.used_slots) for a in self]

    def convertible(self, nbytes: int, owner: str) -> list[ContainerReport]:
        """Return reports of the containers (arenas or slab files) that now have another size of slots or another owner,
        are large enough for `nbytes` bytes, and could be cut anew for `owner` once they are empty.
        """
        unfit = self.aside | self.barred
        return [
            report
            for report in self.reports()
            if report.nbytes >= nbytes
            and report.container not in unfit
            and (report.owner, report.slot_bytes) != (owner, nbytes)
        ]

    def set_aside(self, number: int) -> None:
        """Hand out no more slots of the container `number` until `put_back` is called, because the caller is emptying
        it.
        """
        self.aside.add(number)
        self.forget_room(self.by_number[number])
        self.empty.pop(number, None)

    def put_back(self, number: int) -> bool:
        """Hand out slots of the container `number` again, after `set_aside`. Return True if none of its slots is used
        now.
        """
        self.aside.discard(number)
        container = self.by_number.get(number)
        if container is None:
            return False
        if number not in self.barred:
            if container.used_slots == 0:
                self.empty[number] = container
            elif container.has_room:
                self._list_room(container)
        return container.used_slots == 0

    def bar(self, container: Of) -> None:
        """Hand out no slot of `container` any more. Its used slots can still be freed."""
        self.barred.add(container.number)
        self.forget_room(container)
        self.empty.pop(container.number, None)

    def forget_room(self, container: Of) -> None:
        """Hand out no more slots of `container` in its present size. It may still be cut to another size when it is
        empty.
        """
        rooms = self.with_room.get((container.owner, container.slot_bytes))
        if rooms and container in rooms:
            rooms.remove(container)

    def _list_room(self, container: Of) -> None:
        self.with_room[container.owner, container.slot_bytes].append(container)


class ContainerTier(Tier):
    """A tier whose room is cut into containers (arenas or slab files). A subclass sets `_containers`, the list of
    them.
    """

    _containers: Containers[Any]

    @property
    def used_bytes(self) -> int:
        return self._containers.used_bytes

    @property
    def capacity_bytes(self) -> int:
        """The configured capacity in bytes; `ceiling_bytes` is the part that may be used for now."""
        return self._containers.capacity_bytes

    @property
    def ceiling_bytes(self) -> int:
        return self._containers.ceiling_bytes

    def set_ceiling(self, nbytes: int) -> None:
        """Let the tier use at most `nbytes` bytes from now on, or its capacity if that is less. If more is used, the
        slots in use stay until the caller frees them.
        """
        self._containers.ceiling_bytes = min(nbytes, self.capacity_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """Set the capacity and the ceiling (the part that may be used) to `capacity_bytes`. Raises ValueError if more
        bytes are used now; the caller then calls `set_ceiling` and frees slots first.
        """
        if capacity_bytes < self.used_bytes:
            raise ValueError(f"{self.used_bytes} bytes are used, the capacity cannot be {capacity_bytes}")
        self._containers.capacity_bytes = self._containers.ceiling_bytes = capacity_bytes

    def makes_room(self, container: int, nbytes: int, owner: str = "") -> bool:
        return self._containers.makes_room(container, nbytes, owner)

    def containers(self) -> list[ContainerReport]:
        return self._containers.reports()

    def convertible(self, nbytes: int, owner: str = "") -> list[ContainerReport]:
        return self._containers.convertible(nbytes, owner)

    def set_aside(self, container: int) -> None:
        self._containers.set_aside(container)

    def put_back(self, container: int) -> bool:
        return self._containers.put_back(container)


class SingleSlots:
    """An allocator of slots of any size, together at most `capacity_bytes` bytes. Each slot is a container by itself,
    with a number above `last_number`. `len` gives the number of slots in use.
    """

    def __init__(self, capacity_bytes: int, last_number: int = 0) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._taken: dict[int, Slot] = {}  # by container
        self._free: dict[int, list[Slot]] = {}  # by size
        self._containers = last_number

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, nbytes: int) -> Slot | None:
        """Return a free slot of `nbytes` bytes, or None if the capacity has no room."""
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
        """Free `slot`. Raises RuntimeError if it is not in use."""
        if self._taken.get(slot.container) != slot:
            raise RuntimeError(f"{slot} is freed but not allocated")
        del self._taken[slot.container]
        self._free.setdefault(slot.nbytes, []).append(slot)
        self.used_bytes -= slot.nbytes
