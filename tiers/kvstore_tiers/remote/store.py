"""The object store of a remote tier: blocks' images as sealed values in a store that a worker process reaches.

Owns the shared memory and the worker. An image is written into that memory by the tier, sealed and stored by the
worker, and the other way round. Half of the memory is for reads: writes that wait for a slow store hold up no read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvstore_tiers.objects import DIGEST_BYTES, DamagedObject, ObjectStore
from kvstore_tiers.remote.envelope import HEAD_BYTES, value_bytes
from kvstore_tiers.remote.exchange import PART_ALIGNMENT, Exchange, Parts
from kvstore_tiers.remote.process import Message, Settings, WorkerProcess

NAMES_A_CALL = 1000
READERS, WRITERS = 2, 2  # threads of the worker; each serves what waits in one call


class RemoteStore(ObjectStore):
    """`url` as in `drivers`. `secret`: of the node or cluster. `is_plain(digest)`: whether a tenant wants its blocks
    stored without encryption."""

    def __init__(
        self, name: str, url: str, *, secret: bytes, is_plain: Callable[[bytes], bool], timeout_s: float,
        exchange_bytes: int, credentials: Mapping[str, str],
    ) -> None:  # fmt: skip
        self.name = name
        self._is_plain = is_plain
        self._exchange = Exchange(exchange_bytes)
        half = exchange_bytes // 2 // PART_ALIGNMENT * PART_ALIGNMENT
        self._for_reads, self._for_writes = Parts(0, half), Parts(half, exchange_bytes)
        self.largest_bytes = half // 2 - 2 * PART_ALIGNMENT
        settings = Settings(url, timeout_s, credentials, secret.hex(), READERS, WRITERS)
        self._worker = WorkerProcess(name, settings, self._exchange.fd)

    @property
    def is_ready(self) -> bool:
        return self._worker.is_ready

    @property
    def worker_pid(self) -> int | None:
        return self._worker.pid

    @property
    def restarts(self) -> int:
        """Of the worker, since the tier was opened."""
        return self._worker.restarts

    def sizes(self, names: Sequence[bytes]) -> list[int]:
        return [size for answer in self._call_for("sizes", names) for size in answer["sizes"]]

    @contextmanager
    def read(self, name: bytes, most_bytes: int) -> Iterator[memoryview | None]:
        most_bytes = min(most_bytes, self.largest_bytes)
        plain = self._plain(name)
        with self._part(self._for_reads, most_bytes, plain=plain) as (value, image):
            answer = self._worker.call({
                "verb": "read", "name": name.hex(), "value": value, "image": image, "plain": plain,
            })  # fmt: skip
            if "damaged" in answer:
                raise DamagedObject(answer["damaged"])
            found = answer["image"]
            yield None if found is None else self._exchange.memory[found[0] : found[0] + found[1]]

    def write(self, name: bytes, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        plain = self._plain(name)
        with self._part(self._for_writes, nbytes, plain=plain) as (value, image):
            fill(self._exchange.memory[image[0] : image[0] + nbytes])
            self._worker.call({"verb": "write", "name": name.hex(), "value": value, "image": image, "plain": plain})

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
        """The answers of calls for so many names each that a message fits the socket."""
        pieces = (names[first : first + NAMES_A_CALL] for first in range(0, len(names), NAMES_A_CALL))
        return [self._worker.call({"verb": verb, "names": [name.hex() for name in piece]}) for piece in pieces]

    def _plain(self, name: bytes) -> bool:
        return self._is_plain(name[:DIGEST_BYTES])

    @contextmanager
    def _part(self, parts: Parts, nbytes: int, *, plain: bool) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        """Places of a value and of its image, as offset and bytes: of a plain value, inside it."""
        sealed = value_bytes(nbytes)
        at_image = -(-sealed // PART_ALIGNMENT) * PART_ALIGNMENT
        whole = parts.take(sealed if plain else at_image + nbytes)
        try:
            yield (whole[0], sealed), (whole[0] + (HEAD_BYTES if plain else at_image), nbytes)
        finally:
            parts.give_back(whole)
