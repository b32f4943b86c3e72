"""An object store in this process that is slow, forgets, damages and fails, as a key-addressed tier must expect."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence

from kvstore_tiers.keyed import ObjectStore


class LossyStore(ObjectStore):
    """Each operation takes `latency_s`. Of writes, so many are lost although they are answered, stored with a flipped
    bit, or refused with OSError (shares of 1, drawn by `seed`); reads and questions are refused with the last share.

    `hang` makes every operation wait until `let_go`. Objects outlive `close`: another tier over this store has them.
    """

    def __init__(
        self, name: str = "remote", *, latency_s: float = 0.0, lost: float = 0.0, damaged: float = 0.0,
        refused: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self.latency_s, self.lost, self.damaged, self.refused = latency_s, lost, damaged, refused
        self.objects: dict[bytes, bytes] = {}
        self.questions = 0  # names asked for by `sizes`
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

    def read(self, name: bytes) -> bytes | None:
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            return self.objects.get(name)

    def write(self, name: bytes, image: memoryview) -> None:
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            if self._random.random() < self.lost:
                self.objects.pop(name, None)
                return
            stored = bytearray(image)
            if self._random.random() < self.damaged:
                stored[self._random.randrange(len(stored))] ^= 1 << self._random.randrange(8)
            self.objects[name] = bytes(stored)

    def remove(self, name: bytes) -> None:
        self._pass_time()
        with self._lock:
            self._maybe_refuse()
            self.objects.pop(name, None)

    def close(self) -> None:
        pass

    def _pass_time(self) -> None:
        self._open.wait()
        if self.latency_s:
            self._waiting.wait(self.latency_s)

    def _maybe_refuse(self) -> None:
        if self._random.random() < self.refused:
            raise OSError(111, "the store refuses")
