"""Filling the store with an object's content: several threads each read a part, digest it, and put it.

A part that is stored already is not written again, so a put that was interrupted goes on where it ended, and equal
parts of two objects are one block. Nothing names the parts until all of them are stored. Their pins are another owner's
until then, and end by themselves: a put that is killed leaves none.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from kvstore_client.arguments import PutTerms
from kvstore_client.errors import DaemonUnavailable, no_answer
from kvstore_client.memory import Bytes
from kvstore_client.objects.sources import SLACK_BYTES, Source
from kvstore_client.put import REASON_NO_STAGING
from kvstore_client.receipt import DURABLE, PutReceipt
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.session import Session
from kvstore_proto.arena import HEADER_BYTES
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import BlockKeys
from kvstore_proto.manifest import PART_CLASSES, PIN_OWNER, class_bytes, part_digest, part_tokens, parts_of
from kvstore_proto.v1.explain_pb2 import ExplainRequest

THREADS = 4  # reads under way at once: what an NVMe drive wants for parts of this size
RETRY_S = 0.05
PUT_OWNER, PUT_PIN_S = "objects being put", 600.0  # of pins of a put under way; their time from the last part on
LARGE_PAGE_BYTES = 2 << 20


class Filled(NamedTuple):
    """The outcome of a fill: the digest of each part, and how many bytes were new and how many parts are durable."""

    parts: tuple[bytes, ...]
    new_bytes: int
    durable_parts: int


Progress = Callable[[int, int], None]
"""Called with the bytes that are stored so far, and the bytes of all."""


@dataclass(frozen=True)
class Filling:
    """A way to store contents through `session`: in parts of `part_bytes` bytes, with the durability and the terms of a
    put, within `deadline_s` seconds for each part. `stored` has the digests of the parts that are stored so far."""

    session: Session
    part_bytes: int
    durability: str
    terms: PutTerms
    deadline_s: float
    stored: set[bytes] = field(default_factory=set)
    _failures: list[Exception] = field(default_factory=list)  # of parts: after the first no more are begun

    def fill(self, source: Source, progress: Progress = lambda done, total: None) -> Filled:
        """Store the content of `source`, and return its parts. Raises KVStoreError if a part cannot be stored, and the
        errors of the source.
        """
        parts = parts_of(source.nbytes, self.part_bytes)
        buffers: queue.SimpleQueue[Bytes] = queue.SimpleQueue()
        threads = min(THREADS, parts)
        for _ in range(threads):
            buffers.put(_buffer(self.part_bytes + SLACK_BYTES))
        digests, receipts, new_bytes, done = [b""] * parts, list[PutReceipt](), 0, 0
        with ThreadPoolExecutor(threads, thread_name_prefix="kvstore-fill") as pool:
            for part, (digest, receipt, nbytes) in self._stored(pool, source, buffers, parts):
                digests[part] = digest
                receipts.append(receipt)
                new_bytes += nbytes * receipt.stored_blocks
                done += min(self.part_bytes, source.nbytes - part * self.part_bytes)
                progress(done, source.nbytes)
        until = time.monotonic() + self.deadline_s
        for receipt in receipts:
            receipt.settle(max(until - time.monotonic(), 0.0))
        return Filled(tuple(digests), new_bytes, sum(receipt.durability.count(DURABLE) for receipt in receipts))

    def make_whole(
        self, name: str, keys: BlockKeys, contents: Sequence[Source], progress: Progress = lambda done, total: None
    ) -> None:
        """Store again what a remove took of the parts `keys` of the object `name`, which `contents` has. Raises
        KVStoreError if parts of it do not stay."""
        missing, reason = self._missing(keys)
        if missing and reason not in ("evicted", "quota"):
            for source in contents:
                self.fill(source, progress)
            missing, _ = self._missing(keys)
        if missing and reason == "expired":
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"{name}: parts expired before all were put: give a longer ttl")
        if missing:
            raise KVStoreError(
                ErrorKind.UNAVAILABLE,
                f"{name}: {missing} of {len(keys)} parts were evicted while the others were put: the object is larger "
                "than what DRAM and NVMe may hold of this tenant; raise their capacity, or its host_max and nvme_max",
            )

    def pin(self, name: str, keys: BlockKeys, manifest: Source) -> None:
        """Give the pins of the parts `keys` of the object `name` to the owner who keeps them. The content `manifest` is
        stored again, as durable as the pins are to be. Raises KVStoreError if parts are gone, or these are too many."""
        pin_parts(self.session, name, keys, PUT_OWNER)
        replace(self, terms={"pin": PIN_OWNER}).fill(manifest)

    def let_go(self) -> None:
        """End the pins of the put, as far as the daemon answers."""
        for digest in self.stored if "pin" in self.terms else ():
            with contextlib.suppress(KVStoreError):
                self.session.touch(part_tokens(digest), unpin=PUT_OWNER)

    def durable(self, keys: BlockKeys) -> int:
        """Return how many of the parts `keys` are durable now: some may have left NVMe again to make room."""
        asked = ExplainRequest(keys=[key.hex() for key in keys])
        described = self.session.explain(asked, deadline_s=self.deadline_s)
        if described is None:
            raise no_answer(REASON_DEADLINE)
        return sum(each.block.durability == DURABLE for each in described.blocks)

    def _missing(self, keys: BlockKeys) -> tuple[int, str]:
        found = self.session.lookup(keys=keys, deadline_s=self.deadline_s)
        if len(found.tiers) < len(keys):
            raise no_answer(found.reason)
        return found.tiers.count("absent"), found.reason

    def _stored(
        self, pool: ThreadPoolExecutor, source: Source, buffers: queue.SimpleQueue[Bytes], parts: int
    ) -> Iterator[tuple[int, tuple[bytes, PutReceipt, int]]]:
        """Yield the outcome of each part, as they end; no more are begun than there are buffers."""
        begun: dict[Future[tuple[bytes, PutReceipt, int]], int] = {}
        following = iter(range(parts))
        try:
            while True:
                while len(begun) < 2 * THREADS and (part := next(following, None)) is not None:
                    begun[pool.submit(self._store, source, buffers, part)] = part
                if not begun:
                    return
                for future in wait(begun, return_when=FIRST_COMPLETED).done:
                    yield begun.pop(future), future.result()
        finally:
            for future in begun:
                future.cancel()

    def _store(self, source: Source, buffers: queue.SimpleQueue[Bytes], part: int) -> tuple[bytes, PutReceipt, int]:
        offset = part * self.part_bytes
        length = min(self.part_bytes, source.nbytes - offset)
        buffer = buffers.get()
        try:
            if self._failures:
                raise self._failures[0]
            begin = source.fill(offset, length, buffer)
            payload = buffer[begin : begin + class_bytes(max(length, 1), self.part_bytes)]
            payload[length:] = 0
            digest = part_digest(payload)
            return digest, self._put(digest, payload), len(payload)
        except Exception as error:
            self._failures.append(error)
            raise
        finally:
            buffers.put(buffer)

    def _put(self, digest: bytes, payload: Bytes) -> PutReceipt:
        until = time.monotonic() + self.deadline_s
        while True:
            left_s = max(until - time.monotonic(), 0.001)
            receipt = self.session.put(
                part_tokens(digest), payloads=[payload], durability=self.durability, deadline_s=left_s, **self.terms
            )
            if receipt.visible_blocks:
                self.stored.add(digest)
                return receipt
            is_refused = receipt.statuses[0] in ("over_quota", "failed") and receipt.reason != REASON_DEADLINE
            if time.monotonic() >= until or is_refused:
                raise self._failure(receipt.reason or "no room")
            time.sleep(RETRY_S)

    def _failure(self, reason: str) -> KVStoreError:
        goes_on = f"parts stored so far: {len(self.stored)}; put the same again, and it goes on from there"
        if reason in (REASON_NO_DAEMON, REASON_DEADLINE):
            return DaemonUnavailable(f"{no_answer(reason).message}; {goes_on}")
        return KVStoreError(ErrorKind.UNAVAILABLE, f"a part was not stored: {reason}; {goes_on}")


def put_terms(pin: bool, ttl: float | None) -> PutTerms:
    """Return the terms of the parts of a put, pinned while it is under way if `pin`, which expire after `ttl` seconds,
    or never."""
    return {"pin": PUT_OWNER, "pin_ttl": PUT_PIN_S, "ttl": ttl or 0} if pin else {"ttl": ttl or 0}


def pin_parts(session: Session, name: str, keys: BlockKeys, unpin: str = "") -> None:
    """Pin the parts `keys` of the object `name`, and end the pins of `unpin` on them. The last part that is pinned is
    the manifest's, by which the daemon sees whether the object is. Raises KVStoreError if parts are missing, or too
    many bytes."""
    try:
        touched = session.touch(keys=keys, pin=PIN_OWNER, unpin=unpin)
    except KVStoreError as error:
        raise KVStoreError(error.kind, f"{name} is stored, but not pinned: {error.message}") from None
    if touched < len(keys):
        if "absent" not in session.lookup(keys=keys).tiers:
            raise no_answer(REASON_NO_DAEMON if session.daemon is None else REASON_DEADLINE)
        raise KVStoreError(ErrorKind.UNAVAILABLE, f"{name}: not all of its parts are stored: put it again")


def largest_part(session: Session) -> int:
    """Return the largest size of parts that `session` can put. Raises KVStoreError if there is none."""
    daemon = session.daemon
    if daemon is None:
        raise no_answer(REASON_NO_DAEMON)
    room = 0 if daemon.staging is None else min(len(daemon.staging.memory) - HEADER_BYTES, daemon.max_block_bytes)
    fitting = [size for size in PART_CLASSES if size <= room]
    if not fitting:
        raise KVStoreError(ErrorKind.UNAVAILABLE, f"no part can be put: {REASON_NO_STAGING}")
    return fitting[-1]


def _buffer(nbytes: int) -> Bytes:
    """Return memory that begins at a page, in large pages where there are any: direct reads pin each page."""
    memory = mmap.mmap(-1, -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
