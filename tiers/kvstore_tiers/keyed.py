"""A tier over a store that knows objects by name: another machine, an object store, a cache server.

The module owns the names of the blocks in its slots, their part of the capacity, and the order of operations on one
name. A name is the tenant's digest and the block's key, so that equal keys of two tenants are two objects. An object
shows by itself whether it is whole: the store may forget, delay and damage objects, and is never believed. The tier has
no containers: each slot is one by itself.

Beyond the contract of a tier: `find` asks for blocks that this tier has no slot for (another process wrote them),
`adopt` gives a slot to a found one, and `remove` deletes blocks whether it has slots for them or not. Freeing a slot
evicts its object, which the store may keep for others; quarantine removes it, so that a damaged object is not found
again and the block can be stored anew.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

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
from kvstore_tiers.containers import SingleSlots
from kvstore_tiers.counters import TransferCounters
from kvstore_tiers.image import judge_header, require_slot_size
from kvstore_tiers.objects import DIGEST_BYTES, DamagedObject, Found, ObjectStore, object_name
from kvstore_tiers.segments import gather_and_checksum, put_bytes, scatter_and_checksum, total_bytes
from kvstore_tiers.threads import PendingWrites, ResidentThreads, WaitingReads, deliver, run_transfer

UNKNOWN = -2
CLOSE_S = 2.0  # for what is under way when the tier is closed
MOST_UNREMOVED = 65536  # names: of older ones the orders were answered as failed, and have to be given again
WRITERS = 16  # threads; questions have one of their own
READERS = 2  # each serves what waits together. No more wait behind each other in the store, whose time limit is for two


class KeyedTier(Tier):
    """A tier that keeps blocks as named objects in a remote `store`, which may forget them. Its slots have at most
    `capacity_bytes` bytes together. `readers` and `writers` are numbers of threads that wait for the store.
    `refuses(digest)` is true if blocks of the tenant with this digest must not be in this store; callers then neither
    write nor ask for them.
    """

    def __init__(
        self, store: ObjectStore, capacity_bytes: int, *, readers: int = READERS, writers: int = WRITERS,
        refuses: Callable[[bytes], bool] = lambda _digest: False,
    ) -> None:  # fmt: skip
        self.info = TierInfo(store.name, "keyed", MemoryKind.FILE)
        self.refuses = refuses
        self._store = store
        self._slots = SingleSlots(capacity_bytes)
        self._counters = TransferCounters()
        self._questions = ResidentThreads(f"{store.name}-ask", 1)
        self._reads = WaitingReads(f"{store.name}-read", readers, self._read_some)
        self._writers = ResidentThreads(f"{store.name}-write", writers)
        self._lock = threading.Lock()
        self._names: dict[int, bytes] = {}  # by container
        self._holders: Counter[bytes] = Counter()  # slots of one name
        self._order: dict[bytes, deque[_Operation]] = {}  # by name; the first is under way
        self._pending = PendingWrites()  # removals too
        self._unremoved: dict[bytes, None] = {}  # names that the store refused to remove, oldest first
        self._quiet = threading.Condition(self._lock)
        self._running = 0
        self._closed = self._is_given_up = False

    # Room

    def allocate(self, nbytes: int, owner: str = "") -> Slot | None:
        require_slot_size(nbytes)
        return None if self._closed or nbytes > self._store.largest_bytes else self._slots.take(nbytes)

    def free(self, slot: Slot) -> None:
        name = self._unname(slot)
        if name is not None:
            self._submit_write([name], partial(self._store.evict, [name]), self._pending.begin(self._evicted))

    def discard(self, slot: Slot) -> None:
        """Free `slot`, and remove its block's object from the store."""
        name = self._unname(slot)
        if name is not None:
            self._remove([name])

    def quarantine(self, slot: Slot, reason: str) -> None:
        self.discard(slot)

    def _unname(self, slot: Slot) -> bytes | None:
        """Free the slot; return the name that no slot has any more."""
        self._slots.free(slot)
        with self._lock:
            name = self._names.pop(slot.container, None)
            if name is None:
                return None
            self._holders[name] -= 1
            if self._holders[name]:
                return None
            del self._holders[name]
        return name

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
            stamped = header

            def fill(image: memoryview) -> None:
                nonlocal stamped
                address = _address_of(image)
                hashed = 0 if header.checksum else header.payload_bytes
                checksum = gather_and_checksum(address + HEADER_BYTES, segments, hashed)
                stamped = header.stamped(slot.generation, header.checksum or checksum)
                put_bytes(address, stamped.pack())

            self._store.write(name, HEADER_BYTES + header.payload_bytes, fill)
            return Outcome(OutcomeKind.DONE, stamped, header.payload_bytes)

        self._submit_write([name], store, self._pending.begin(lambda outcome: done(self._counters.wrote(outcome))))

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        with self._lock:
            name = self._names.get(slot.container)

        job = _Operation([name or expect_key], lambda outcome: done(self._counters.read(outcome)))
        if name is None or name[DIGEST_BYTES:] != expect_key:
            message = f"no block {expect_key.hex()} was written to this slot"
            job.begin = partial(self._end, job, Outcome(OutcomeKind.CORRUPT, message=message))  # waits for no store
        else:
            job.begin = partial(self._reads.put, _Read(job, name, slot, segments))
        self._submit(job)

    def _read_some(self, reads: Sequence[_Read]) -> int:
        """End the leading ones of these reads, as many as the store has memory for; return their number."""
        ended = 0

        def fetch() -> Outcome:
            nonlocal ended
            with self._store.read([(read.name, read.slot.nbytes) for read in reads]) as found:
                for read, image in zip(reads, found, strict=False):
                    ended += 1
                    self._end(read.job, run_transfer(partial(self._unpacked, read, image)))
            return Outcome(OutcomeKind.DONE)

        outcome = run_transfer(fetch)
        if not outcome.ok:
            for read in reads[ended:]:
                self._end(read.job, outcome)
            return len(reads)
        return ended

    def _unpacked(self, read: _Read, image: Found) -> Outcome:
        if isinstance(image, DamagedObject):
            return Outcome(OutcomeKind.CORRUPT, message=str(image))
        if image is None:
            message = f"{self.info.name} has forgotten {read.name[DIGEST_BYTES:].hex()}"
            return Outcome(OutcomeKind.MISSING, message=message)
        return _unpack(image, read.slot, read.name, read.segments)

    def sync(self, done: Completion) -> None:
        """Call `done` when the store has everything that was written before this call, and nothing that was removed
        before it. `done` gets FAILED if the store refused to remove an object; the next `sync` tries again for the last
        65,536 such names.
        """
        with self._lock:
            again, self._unremoved = [name for name in self._unremoved if name not in self._holders], {}
        if again:
            self._remove(again)

        def ended(all_well: bool) -> None:
            kind = OutcomeKind.DONE if all_well else OutcomeKind.FAILED
            done(Outcome(kind, message="" if all_well else "the store did not remove an object"))

        self._pending.when_ended(ended)

    def probe(self, done: Completion, *, thorough: bool = True) -> None:
        def ask() -> Outcome:
            self._store.probe()
            return Outcome(OutcomeKind.DONE)

        self._questions.submit(ask, done)

    # Blocks that others stored

    @property
    def is_ready(self) -> bool:
        """True if the store has started, so that a request to it does not wait for the start."""
        return self._store.is_ready

    def find(self, tenant: bytes, keys: Sequence[bytes], done: Callable[[list[int]], None]) -> None:
        """Ask the store which of the tenant's blocks `keys` it has. `done` is called on a thread of the tier with the
        payload bytes of each block in the order of `keys`, -1 for a missing block; every entry is `UNKNOWN` (-2) if the
        store did not answer. `tenant` is the tenant's digest, 16 bytes.
        """
        names = [object_name(tenant, key) for key in keys]

        def ask() -> Outcome:
            found[:] = [size - HEADER_BYTES if size >= HEADER_BYTES else -1 for size in self._store.sizes(names)]
            return Outcome(OutcomeKind.DONE)

        found = [-1] * len(names)
        self._questions.submit(ask, lambda outcome: done(found if outcome.ok else [UNKNOWN] * len(names)))

    def adopt(self, slot: Slot, tenant: bytes, key: bytes) -> None:
        """Assign the allocated `slot` to the block `key`, which `find` has found in the store. `tenant` is the tenant's
        digest, 16 bytes.
        """
        self._name(slot, object_name(tenant, key))

    def remove(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        """Delete the blocks `keys` of the tenant with the digest `tenant` from the store, also blocks that have no slot
        of this tier. The call returns at once; a failure is reported by `sync`.
        """
        self._remove(list(dict.fromkeys(object_name(tenant, key) for key in keys)))

    # Reports

    def location(self, slot: Slot) -> str:
        return f"{self.info.name}:{self._names.get(slot.container, b'').hex()}"

    def statistics(self) -> TierStatistics:
        return self._counters.report(
            TierStatistics(
                state=TierState.CLOSED if self._closed else TierState.OK,
                capacity_bytes=self._slots.capacity_bytes,
                used_bytes=self._slots.used_bytes,
                blocks=len(self._slots),
                used_by={"blocks": self._slots.used_bytes},
            )
        )  # fmt: skip

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._quiet:
            self._quiet.wait_for(lambda: not self._running, CLOSE_S)
        self._is_given_up = True
        self._store.abort()  # questions too: a store that is slow, or away, must not keep the daemon from ending
        with self._quiet:
            self._quiet.wait_for(lambda: not self._running)
        self._reads.close()
        for threads in (self._questions, self._writers):
            threads.close()
        self._store.close()

    # Order

    def _submit(self, job: _Operation) -> None:
        """Begin `job` after earlier jobs on any of its names."""
        if self._closed:
            deliver(Outcome(OutcomeKind.CANCELLED, message="the tier is closed"), job.done)
            return
        job.waits_for = len(job.names)
        with self._lock:
            self._running += 1
            for name in job.names:
                order = self._order.setdefault(name, deque())
                order.append(job)
                job.waits_for -= order[0] is job
            is_ready = not job.waits_for
        if is_ready:
            job.begin()

    def _submit_write(self, names: Sequence[bytes], write: Callable[[], Outcome | None], done: Completion) -> None:
        """Run `write` on a thread; None from it stands for DONE."""
        job = _Operation(names, done)

        def run() -> None:
            self._end(job, run_transfer(lambda: write() or Outcome(OutcomeKind.DONE)))

        job.begin = partial(self._writers.post, run)
        self._submit(job)

    def _end(self, job: _Operation, outcome: Outcome) -> None:
        if self._is_given_up and outcome.kind is OutcomeKind.FAILED:
            outcome = Outcome(OutcomeKind.CANCELLED, message="the tier was closed before the store answered")
        deliver(outcome, job.done)
        ready: list[_Operation] = []
        with self._lock:
            for name in job.names:
                order = self._order[name]
                order.popleft()
                if not order:
                    del self._order[name]
                    continue
                order[0].waits_for -= 1
                if not order[0].waits_for:
                    ready.append(order[0])
        for following in ready:
            following.begin()
        with self._quiet:
            self._running -= 1
            if not self._running:
                self._quiet.notify_all()

    def _remove(self, names: Sequence[bytes]) -> None:
        def removed(outcome: Outcome) -> None:
            if not outcome.ok:
                self._counters.failed()
                with self._lock:
                    self._unremoved.update(dict.fromkeys(names))
                    while len(self._unremoved) > MOST_UNREMOVED:
                        del self._unremoved[next(iter(self._unremoved))]

        self._submit_write(
            names, partial(self._store.remove, names), self._pending.begin(removed, must_succeed=True)
        )  # fmt: skip

    def _evicted(self, outcome: Outcome) -> None:
        if not outcome.ok:
            self._counters.failed()


@dataclass(slots=True)
class _Operation:
    """An operation. `begin` hands it to a thread, once no operation is before it; `waits_for`: the number of its names
    that have one before it.
    """

    names: Sequence[bytes]
    done: Completion
    begin: Callable[[], object] = lambda: None
    waits_for: int = 0


class _Read(NamedTuple):
    job: _Operation
    name: bytes
    slot: Slot
    segments: Sequence[Segment]


def _address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _unpack(image: memoryview, slot: Slot, name: bytes, segments: Sequence[Segment]) -> Outcome:
    """Judge an object, and copy its payload to `segments`."""
    header = judge_header(bytes(image[:HEADER_BYTES]), name[DIGEST_BYTES:], slot.nbytes - HEADER_BYTES)
    if isinstance(header, str):
        return Outcome(OutcomeKind.CORRUPT, message=header)
    if header.tenant != name[:DIGEST_BYTES] or len(image) != HEADER_BYTES + header.payload_bytes:
        return Outcome(OutcomeKind.CORRUPT, message="the object is of another tenant, or of another length")
    if total_bytes(segments) < header.payload_bytes:
        return Outcome(OutcomeKind.FAILED, message=f"{header.payload_bytes} payload bytes do not fit the destination")
    payload = _address_of(image) + HEADER_BYTES
    if scatter_and_checksum(payload, header.payload_bytes, segments) != header.checksum:
        return Outcome(OutcomeKind.CORRUPT, message="the payload does not have the header's checksum")
    return Outcome(OutcomeKind.DONE, replace(header, generation=slot.generation), header.payload_bytes)
