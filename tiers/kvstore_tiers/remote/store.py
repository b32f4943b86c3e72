"""The object store of a remote tier: blocks' images as sealed values in a store that a worker process reaches.

The module owns the shared memory and the worker. The tier writes an image into that memory, and the worker seals and
stores it; reads go the other way. Half of the memory is for reads: writes that wait for a slow store hold up no read.
Invariant: a part of the memory is reused only when the worker has answered for it, or is dead.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvstore_tiers.objects import DIGEST_BYTES, DamagedObject, Found, ObjectStore
from kvstore_tiers.range_allocator import PART_ALIGNMENT, RangeAllocator
from kvstore_tiers.remote.envelope import HEAD_BYTES, value_bytes
from kvstore_tiers.remote.process import Message, RemoteSettings, RemoteWorkerProcess

NAMES_A_CALL = 1000
READERS, WRITERS = 2, 2  # threads of the worker


class Exchange:
    """Shared memory of `nbytes` bytes, mapped here as `memory`. Another process maps it by the descriptor `fd`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = os.memfd_create("kvstored-remote", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, nbytes)
        self._mapping = mmap.mmap(self.fd, nbytes)
        self.memory = memoryview(self._mapping)

    def close(self) -> None:
        os.close(self.fd)
        self.memory.release()
        self._mapping.close()


class _ImagePlace(NamedTuple):
    """The size and layout of the memory for an image's value, and for the image itself: inside a plain value, behind an
    encrypted one.
    """

    image_bytes: int
    is_plain: bool

    @property
    def nbytes(self) -> int:
        return value_bytes(self.image_bytes) if self.is_plain else self._image_begins + self.image_bytes

    def request(self, name: bytes, offset: int) -> Message:
        """Return the request for the object `name`, whose place begins at `offset`."""
        value, image = (offset, value_bytes(self.image_bytes)), (offset + self._image_begins, self.image_bytes)
        return {"name": name.hex(), "value": value, "image": image, "plain": self.is_plain}

    @property
    def _image_begins(self) -> int:
        return HEAD_BYTES if self.is_plain else -(-value_bytes(self.image_bytes) // PART_ALIGNMENT) * PART_ALIGNMENT


class RemoteStore(ObjectStore):
    """An object store, for a key-addressed tier, that reaches the remote store at `url` through a worker process.
    Values pass through `exchange_bytes` of shared memory. `secret` is the secret of the node or cluster, from which
    keys are made. `is_plain(digest)` returns True if the tenant with this digest wants its blocks stored without
    encryption.
    """

    def __init__(
        self, name: str, url: str, *, secret: bytes, is_plain: Callable[[bytes], bool], timeout_s: float,
        exchange_bytes: int, credentials: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.name = name
        self._is_plain = is_plain
        self._exchange = Exchange(exchange_bytes)
        half = exchange_bytes // 2 // PART_ALIGNMENT * PART_ALIGNMENT
        self._for_reads, self._for_writes = RangeAllocator(0, half), RangeAllocator(half, exchange_bytes)
        self.largest_bytes = half // 2 - 2 * PART_ALIGNMENT
        settings = RemoteSettings(url, timeout_s, credentials, secret.hex(), READERS, WRITERS)
        self._worker = RemoteWorkerProcess(name, settings, self._exchange.fd)

    @property
    def is_ready(self) -> bool:
        return self._worker.is_ready

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid

    @property
    def restarts(self) -> int:
        """The number of times that a new worker process was started in place of a dead one."""
        return self._worker.restarts

    def sizes(self, names: Sequence[bytes]) -> list[int]:
        return [size for answer in self._call_for("sizes", names) for size in answer["sizes"]]

    @contextmanager
    def read(self, wanted: Sequence[tuple[bytes, int]]) -> Iterator[Sequence[Found]]:
        parts: list[tuple[int, int]] = []
        reads: list[Message] = []
        try:
            for name, most_bytes in wanted:
                place = _ImagePlace(min(most_bytes, self.largest_bytes), self._is_plain(name[:DIGEST_BYTES]))
                part = self._for_reads.take_now(place.nbytes) if parts else self._for_reads.take(place.nbytes)
                if part is None:
                    break
                parts.append(part)
                reads.append(place.request(name, part[0]))
            yield [self._found(each) for each in self._worker.call({"verb": "read", "reads": reads})["found"]]
        finally:
            self._for_reads.give_back(*parts)

    def _found(self, answer: Sequence[int] | str | None) -> Found:
        if answer is None:
            return None
        if isinstance(answer, str):
            return DamagedObject(answer)
        return self._exchange.memory[answer[0] : answer[0] + answer[1]]

    def write(self, name: bytes, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        place = _ImagePlace(nbytes, self._is_plain(name[:DIGEST_BYTES]))
        part = self._for_writes.take(place.nbytes)
        try:
            request = place.request(name, part[0])
            fill(self._exchange.memory[request["image"][0] : request["image"][0] + nbytes])
            self._worker.call({"verb": "write", **request})
        finally:
            self._for_writes.give_back(part)

    def evict(self, names: Sequence[bytes]) -> None:
        self._call_for("evict", names)

    def remove(self, names: Sequence[bytes]) -> None:
        self._call_for("remove", names)

    def probe(self) -> None:
        self._worker.call({"verb": "probe"})

    def abort(self) -> None:
        self._for_reads.close()
        self._for_writes.close()
        self._worker.close()

    def close(self) -> None:
        self.abort()
        self._exchange.close()

    def _call_for(self, verb: str, names: Sequence[bytes]) -> list[Message]:
        """Return the answers of calls, each with as many names as a message has room for."""
        pieces = (names[first : first + NAMES_A_CALL] for first in range(0, len(names), NAMES_A_CALL))
        return [self._worker.call({"verb": verb, "names": [name.hex() for name in piece]}) for piece in pieces]
