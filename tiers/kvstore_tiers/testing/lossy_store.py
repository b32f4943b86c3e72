"""An object store in this process that is slow, forgets, damages and fails, as a key-addressed tier must expect."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore_tiers.objects import DamagedObject, Found, ObjectStore


class LossyStore(ObjectStore):
    """An object store for tests that loses, damages and refuses objects. Each operation takes `latency_s` seconds.
    Writes are answered but lost with probability `lost`, and stored with a flipped bit with probability `damaged`.
    Every operation raises OSError with probability `refused`. `seed` determines these faults.

    `hang` makes every operation wait until `let_go` is called. The objects outlive `close`, so that another tier over
    this store has them.
    """

    def __init__(
        self, name: str = "remote", *, latency_s: float = 0.0, lost: float = 0.0, damaged: float = 0.0,
        refused: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.largest_bytes = 1 << 40
        self.latency_s, self.lost, self.damaged, self.refused = latency_s, lost, damaged, refused
        self.objects: dict[bytes, bytes] = {}
        self.questions = 0  # names asked for by `sizes`
        self.calls = 0  # of `read`
        self.memory: int | None = None  # of a call of `read`: so many objects, or any number
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._waiting = threading.Event()
        self._open = threading.Event()
        self._open.set()

    def hang(self) -> None:
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    def sizes(self, names: Sequence[bytes]) -> list[int]:
        self._pass_time()
        with self._lock:
            self.questions += len(names)
            self._maybe_refuse()
            return [len(self.objects.get(name, b"")) for name in names]

    @contextmanager
    def read(self, wanted: Sequence[tuple[bytes, int]]) -> Iterator[Sequence[Found]]:
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            self.calls += 1
            stored = [self.objects.get(name) for name, _ in wanted[: self.memory]]
        yield [_judged(image, most_bytes) for image, (_, most_bytes) in zip(stored, wanted, strict=False)]

    def write(self, name: bytes, nbytes: int, fill: Callable[[memoryview], None]) -> None:
        image = bytearray(nbytes)
        fill(memoryview(image))
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            if self._random.random() < self.lost:
                self.objects.pop(name, None)
                return
            if self._random.random() < self.damaged:
                image[self._random.randrange(nbytes)] ^= 1 << self._random.randrange(8)
            self.objects.setdefault(name, bytes(image))

    def remove(self, names: Sequence[bytes]) -> None:
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            for name in names:
                self.objects.pop(name, None)

    evict = remove

    def close(self) -> None:
        pass

    def _pass_time(self) -> None:
        self._open.wait()
        if self.latency_s:
            self._waiting.wait(self.latency_s)

    def _maybe_refuse(self) -> None:
        if self._random.random() < self.refused:
            raise OSError(111, "the store refuses")


def _judged(image: bytes | None, most_bytes: int) -> Found:
    if image is not None and len(image) > most_bytes:
        return DamagedObject(f"the object has {len(image)} bytes, more than {most_bytes}")
    return None if image is None else memoryview(image)
