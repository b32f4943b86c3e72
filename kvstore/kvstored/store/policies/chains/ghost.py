"""Which chain a removed block belonged to: so that a session which returns after its eviction is known, and
teaches.

Two generations of keys: what is remembered goes to the young one; when that is full it becomes the old one, and the
old one is forgotten. So between `limit` and twice `limit` keys, without the cost of an order. They are kept in shards
by the keys' last bits, keys being hashes, each with generations of its own: no call ever forgets, or moves to a larger
dictionary, more than a shard. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

FAN_BITS = 3
FAN_MAX = (1 << FAN_BITS) - 1
NOTHING = -1
SHARDS = 64
GENERATIONS = ("young", "old")
SHARD_MASK = SHARDS - 1
_GHOST_MIN = 4096
_GHOST_RATIO = 10  # of the tier's blocks,
_GHOST_MANY = 1 << 18  # but no more than this, or than the tier's blocks
TOUCHED_MAX = 4096  # blocks that others than their chain used
_STEP = 1024  # keys copied between two pauses: 0.2 ms

Chains = npt.NDArray[np.int64]


def ghost_limit(rows: int) -> int:
    """How many keys a ghost's generation holds for a tier of so many blocks."""
    return max(_GHOST_MIN, min(_GHOST_RATIO * rows, max(_GHOST_MANY, rows)))


class Shard:
    """Key → chain and fan-out, in one int each."""

    __slots__ = ("old", "young")

    def __init__(self) -> None:
        self.young: dict[bytes, int] = {}
        self.old: dict[bytes, int] = {}


class ChainGhost:
    """One for each tenant. `limit` may be set anew at any time; `forgetting` is called with the chains of what is
    forgotten."""

    __slots__ = ("_forgetting", "limit", "shards", "touched")

    def __init__(self, limit: int, forgetting: Callable[[Chains], None] = lambda chains: None) -> None:
        self.limit = limit
        self.shards = [Shard() for _ in range(SHARDS)]
        self.touched: dict[bytes, tuple[float, float]] = {}  # touches by others, decayed, as of when
        self._forgetting = forgetting

    def __len__(self) -> int:
        return sum(len(shard.young) + len(shard.old) for shard in self.shards)

    def remember(self, key: bytes, chain: int, fan: int) -> None:
        shard = self.shards[key[-1] & SHARD_MASK]
        young = shard.young
        young[key] = chain << FAN_BITS | fan
        if len(young) > self.limit // SHARDS:
            self._forgetting(_chains(shard.old))
            shard.old, shard.young = young, {}

    def remember_touches(self, key: bytes, touches: float, as_of_s: float) -> None:
        """Without them a shared prefix that was evicted would have to prove its worth anew each time it is stored, and
        be the first victim each time.
        """
        touched = self.touched
        touched.pop(key, None)
        touched[key] = touches, as_of_s
        if len(touched) > TOUCHED_MAX:
            del touched[next(iter(touched))]

    def remember_run(self, keys: Sequence[bytes | None], chain: int, fans: Sequence[int]) -> None:
        """`remember` for each of `keys` that there is."""
        shards, most, packed = self.shards, self.limit // SHARDS, chain << FAN_BITS
        for key, fan in zip(keys, fans, strict=True):
            if key is None:
                continue
            shard = shards[key[-1] & SHARD_MASK]
            young = shard.young
            young[key] = packed | fan
            if len(young) > most:
                self._forgetting(_chains(shard.old))
                shard.old, shard.young = young, {}

    def recall_run(self, keys: Sequence[bytes | None]) -> list[int]:
        """What is kept of each key, packed, or -1."""
        shards = self.shards
        found: list[int] = []
        for key in keys:
            if key is None:
                found.append(NOTHING)
                continue
            shard = shards[key[-1] & SHARD_MASK]
            packed = shard.young.get(key)
            if packed is None:
                packed = shard.old.get(key, NOTHING)
            found.append(packed)
        return found

    def packed(self, key: bytes) -> int:
        """Chain and fan-out, or NOTHING."""
        shard = self.shards[key[-1] & SHARD_MASK]
        packed = shard.young.get(key)
        return shard.old.get(key, NOTHING) if packed is None else packed

    def owner_of(self, key: bytes) -> int:
        """The chain of a block that is not in the tier, as far as is known, or -1."""
        return self.packed(key) >> FAN_BITS

    def forget(self, key: bytes) -> None:
        shard = self.shards[key[-1] & SHARD_MASK]
        for keys in (shard.young, shard.old):
            packed = keys.pop(key, NOTHING)
            if packed >= 0:
                self._forgetting(np.array([packed >> FAN_BITS]))
        self.touched.pop(key, None)

    def clear(self) -> None:
        for number, shard in enumerate(self.shards):
            self._forgetting(self.chains(number))
            shard.young, shard.old = {}, {}
        self.touched.clear()

    def copied(self, most: int) -> Iterator[tuple[str, bytes, Chains]]:
        """Generation, packed keys and what is kept of each, a step at a time: `most` keys at most, those remembered
        last. The caller may let others go on between two steps; what changes meanwhile may be in it or not.
        """
        for shard in self.shards:
            left = most // SHARDS
            for generation in GENERATIONS:
                kept: dict[bytes, int] = getattr(shard, generation)
                for first in range(0, min(len(kept), left), _STEP):
                    last = min(first + _STEP, left)
                    packed = np.fromiter(islice(reversed(kept.values()), first, last), np.int64)
                    yield generation, b"".join(islice(reversed(kept), first, last)), packed
                left -= len(kept)

    def restore(self, generation: str, keys: npt.NDArray[np.void], packed: Chains) -> None:
        """Remember `packed` of each of `keys` (dtype V16)."""
        at = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 16)[:, -1] & SHARD_MASK
        order = np.argsort(at, kind="stable")
        ends = np.cumsum(np.bincount(at, minlength=SHARDS)).tolist()
        names, values = keys[order].tolist(), packed[order].tolist()
        for shard, first, last in zip(self.shards, [0, *ends], ends, strict=False):
            getattr(shard, generation).update(zip(names[first:last], values[first:last], strict=True))

    def chains(self, shard: int) -> Chains:
        """Of every key that shard number `shard` remembers."""
        both = self.shards[shard]
        return np.concatenate([_chains(both.young), _chains(both.old)])


def _chains(keys: dict[bytes, int]) -> Chains:
    return np.fromiter(keys.values(), np.int64, len(keys)) >> FAN_BITS
