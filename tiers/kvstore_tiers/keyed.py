"""A tier over a store that knows objects by name: another machine, an object store, a cache server.

Owns the names of the blocks in its slots, what they take of the capacity, and the order of operations on one name. A
name is the tenant's digest and the block's key, so that equal keys of two tenants are two objects. An object is a
block's header page and its payload, and says by itself whether it is whole: the store may forget, delay and damage
objects, and is never believed. It has no containers: each slot is one by itself.

Beyond the contract of a tier: `find` asks for blocks that this tier has no slot for (another process wrote them), and
`adopt` gives a slot to one that was found.
"""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_tiers.base import (
    Completion,
    MemoryKind,
    Outcome,
    OutcomeKind,
    Segment,
    Slot,
    Tier,
    TierInfo,
    TierState,
    TierStatistics,
    require_fits,
)
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import judge_header
from kvstore_tiers.pending_writes import PendingWrites
from kvstore_tiers.segments import AlignedBuffer, checksum_at, gather_and_checksum, put_bytes, scatter, total_bytes
from kvstore_tiers.single_slots import SingleSlots
from kvstore_tiers.sizes import require_slot_size
from kvstore_tiers.threads import ResidentThreads, deliver, run_transfer

THREADS = 8
DIGEST_BYTES = 16


class ObjectStore(ABC):
    """Objects by name. Methods wait, are called from several threads at once, and raise OSError when they fail."""

    name: str

    @abstractmethod
    def sizes(self, names: Sequence[bytes]) -> list[int]:
        """Bytes of each object; 0 where there is none."""

    @abstractmethod
    def read(self, name: bytes) -> bytes | None:
        """The object, or None where there is none."""

    @abstractmethod
    def write(self, name: bytes, image: memoryview) -> None:
        """Store an object, replacing any other of that name. Must not keep `image`."""

    @abstractmethod
    def remove(self, name: bytes) -> None:
        """Forget an object, if there is one."""

    @abstractmethod
    def close(self) -> None: ...


def object_name(tenant: bytes, key: bytes) -> bytes:
    """`tenant` is the digest in the header of its blocks, 16 bytes."""
    return tenant + key


class KeyedTier(Tier):
    """`capacity_bytes` bounds the slots; `threads` operations run at once. Objects may outlive this process, or be
    forgotten: nothing that is only here is durable."""

    def __init__(self, store: ObjectStore, capacity_bytes: int, *, threads: int = THREADS) -> None:
        self.info = TierInfo(store.name, "keyed", MemoryKind.FILE)
        self._store = store
        self._slots = SingleSlots(capacity_bytes)
        self._counters = TransferCounters()
        self._threads = ResidentThreads(store.name, threads)
        self._lock = threading.Lock()
        self._names: dict[int, bytes] = {}  # by container
        self._holders: Counter[bytes] = Counter()  # slots of one name
        self._order: dict[bytes, deque[Callable[[], None]]] = {}  # what waits for the operation under way on its name
        self._pending = PendingWrites()  # removals too
        self._unremoved: set[bytes] = set()  # names that the store refused to remove
        self._quiet = threading.Condition(self._lock)
        self._running = 0
        self._closed = False

    # Room

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        return None if self._closed else self._slots.take(nbytes)

    def free(self, slot: Slot) -> None:
        self._slots.free(slot)
        with self._lock:
            name = self._names.pop(slot.container, None)
            if name is None:
                return
            self._holders[name] -= 1
            if self._holders[name]:
                return
            del self._holders[name]
        self._remove(name)

    def _name(self, slot: Slot, name: bytes) -> None:
        with self._lock:
            former = self._names.get(slot.container)
            if former is not None:
                raise RuntimeError(f"{slot} is written twice")
            self._names[slot.container] = name
            self._holders[name] += 1

    # Transfers

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        require_fits(slot, header, segments)
        name = object_name(header.tenant, header.key)
        self._name(slot, name)

        def store() -> Outcome:
            image = AlignedBuffer(HEADER_BYTES + header.payload_bytes)
            hashed = 0 if header.checksum else header.payload_bytes
            checksum = gather_and_checksum(image.address + HEADER_BYTES, segments, hashed)
            stamped = header.stamped(slot.generation, header.checksum or checksum)
            put_bytes(image.address, stamped.pack())
            whole = (ctypes.c_char * (HEADER_BYTES + header.payload_bytes)).from_address(image.address)
            self._store.write(name, memoryview(whole).cast("B"))
            return Outcome(OutcomeKind.DONE, stamped, header.payload_bytes)

        self._submit(name, store, self._pending.begin(lambda outcome: done(self._counters.wrote(outcome))))

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        with self._lock:
            name = self._names.get(slot.container)

        def fetch() -> Outcome:
            if name is None or name[DIGEST_BYTES:] != expect_key:
                return Outcome(OutcomeKind.CORRUPT, message=f"no block {expect_key.hex()} was written to this slot")
            image = self._store.read(name)
            if image is None:
                return Outcome(OutcomeKind.MISSING, message=f"{self.info.name} has forgotten {expect_key.hex()}")
            return _unpack(image, slot, name, segments)

        self._submit(name or expect_key, fetch, lambda outcome: done(self._counters.read(outcome)))

    def sync(self, done: Completion) -> None:
        """The store has what was written before this call, and no longer what was freed; FAILED where it refuses to
        remove something. The next sync tries that again."""
        with self._lock:
            again, self._unremoved = self._unremoved - self._holders.keys(), set()
        for name in again:
            self._remove(name)

        def ended(all_well: bool) -> None:
            kind = OutcomeKind.DONE if all_well else OutcomeKind.FAILED
            done(Outcome(kind, message="" if all_well else "the store did not remove an object"))

        self._pending.when_ended(ended)

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        def ask() -> Outcome:
            self._store.sizes([bytes(2 * DIGEST_BYTES)])
            return Outcome(OutcomeKind.DONE)

        self._threads.submit(ask, done)

    # Blocks that others stored

    def find(self, tenant: bytes, keys: Sequence[bytes], done: Callable[[list[int]], None]) -> None:
        """Payload bytes of each block of the tenant that the store has; -1 where it has none, or cannot say. `done` is
        called from a thread of the tier's own."""
        names = [object_name(tenant, key) for key in keys]

        def ask() -> Outcome:
            found[:] = [size - HEADER_BYTES if size >= HEADER_BYTES else -1 for size in self._store.sizes(names)]
            return Outcome(OutcomeKind.DONE)

        found = [-1] * len(names)
        self._threads.submit(ask, lambda outcome: done(found if outcome.ok else [-1] * len(names)))

    def adopt(self, slot: Slot, tenant: bytes, key: bytes) -> None:
        """Let an allocated slot be that of a block that `find` found."""
        self._name(slot, object_name(tenant, key))

    # Reports

    def location(self, slot: Slot) -> str:
        return f"{self.info.name}:{self._names.get(slot.container, b'').hex()}"

    def statistics(self) -> TierStatistics:
        return self._counters.report(
            state=TierState.CLOSED if self._closed else TierState.OK,
            capacity_bytes=self._slots.capacity_bytes, used_bytes=self._slots.used_bytes, blocks=len(self._slots),
            used_by={"blocks": self._slots.used_bytes},
        )  # fmt: skip

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._quiet:
            self._quiet.wait_for(lambda: not self._running)
        self._threads.close()
        self._store.close()

    # Order

    def _submit(self, name: bytes, operation: Callable[[], Outcome], done: Completion) -> None:
        """Run `operation` after those before it on the same name."""
        if self._closed:
            deliver(Outcome(OutcomeKind.CANCELLED, message="the tier is closed"), done)
            return
        with self._lock:
            self._running += 1
            job = partial(self._run, name, operation, done)
            waiting = self._order.get(name)
            if waiting is not None:
                waiting.append(job)
                return
            self._order[name] = deque()
        self._threads.post(job)

    def _run(self, name: bytes, operation: Callable[[], Outcome], done: Completion) -> None:
        deliver(run_transfer(operation), done)
        with self._lock:
            waiting = self._order[name]
            following = waiting.popleft() if waiting else None
            if following is None:
                del self._order[name]
        if following is not None:
            self._threads.post(following)
        with self._quiet:
            self._running -= 1
            self._quiet.notify_all()

    def _remove(self, name: bytes) -> None:
        def remove() -> Outcome:
            self._store.remove(name)
            return Outcome(OutcomeKind.DONE)

        def removed(outcome: Outcome) -> None:
            if not outcome.ok:
                self._counters.failed()
                with self._lock:
                    self._unremoved.add(name)

        self._submit(name, remove, self._pending.begin(removed, must_succeed=True))


def _unpack(image: bytes, slot: Slot, name: bytes, segments: Sequence[Segment]) -> Outcome:
    """Judge an object, and copy its payload to `segments`."""
    header = judge_header(image[:HEADER_BYTES], name[DIGEST_BYTES:], slot.nbytes - HEADER_BYTES)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=header)
    if header.tenant != name[:DIGEST_BYTES] or len(image) != HEADER_BYTES + header.payload_bytes:
        return Outcome(OutcomeKind.CORRUPT, message="the object is of another tenant, or of another length")
    if total_bytes(segments) < header.payload_bytes:
        return Outcome(OutcomeKind.FAILED, message=f"{header.payload_bytes} payload bytes do not fit the destination")
    payload = ctypes.c_char_p(image)  # its address: a bytes object does not move
    address = ctypes.cast(payload, ctypes.c_void_p).value or 0
    if checksum_at(address + HEADER_BYTES, header.payload_bytes) != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload does not have the header's checksum")
    scatter(address + HEADER_BYTES, header.payload_bytes, segments)
    return Outcome(OutcomeKind.DONE, replace(header, generation=slot.generation), header.payload_bytes)
