"""Filling the store with an object's content: several threads each read a part, digest it, and put it.

A part that is stored already is not written again, so a put that was interrupted goes on where it ended, and equal
parts of two objects are one block. Nothing names the parts until all of them are stored.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kvstore_client.arguments import PutTerms
from kvstore_client.memory import Bytes
from kvstore_client.objects.sources import SLACK_BYTES, Source
from kvstore_client.receipt import DURABLE, PutReceipt
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.session import Session
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.manifest import class_bytes, part_digest, part_tokens, parts_of

THREADS = 4  # reads under way at once: what an NVMe drive wants for parts of this size
RETRY_S = 0.05
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
    put, within `deadline_s` seconds for each part."""

    session: Session
    part_bytes: int
    durability: str
    terms: PutTerms
    deadline_s: float

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
            begin = source.fill(offset, length, buffer)
            payload = buffer[begin : begin + class_bytes(max(length, 1), self.part_bytes)]
            payload[length:] = 0
            digest = part_digest(payload)
            return digest, self._put(digest, payload), len(payload)
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
                return receipt
            is_refused = receipt.statuses[0] in ("over_quota", "failed") and receipt.reason != REASON_DEADLINE
            if time.monotonic() >= until or is_refused:
                raise KVStoreError(ErrorKind.UNAVAILABLE, f"a part was not stored: {receipt.reason or 'no room'}")
            time.sleep(RETRY_S)


def _buffer(nbytes: int) -> Bytes:
    """Return memory that begins at a page, in large pages where there are any: direct reads pin each page."""
    memory = mmap.mmap(-1, -(-nbytes // LARGE_PAGE_BYTES) * LARGE_PAGE_BYTES)
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)
