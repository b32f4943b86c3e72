"""The chains of removed blocks, remembered so that a session which returns after its eviction is recognised.

There are two generations of keys: a key enters the young one; when that is full it becomes the old one, and the old one
is forgotten. So it holds between `limit` and twice `limit` keys, without the cost of an order. They are kept in shards
by the keys' last bits, keys being hashes, each with generations of its own: no call ever forgets, or moves to a larger
dictionary, more than a shard. A request's path combines the knowledge about its blocks, here and in the ghost.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstored.store.blocks.rows import RowColumns
from kvstored.store.blocks.runs import span_of

FAN_BITS = 3
FAN_MAX = 2**FAN_BITS - 1
NOTHING = -1
SHARDS = 64
GENERATIONS = ("young", "old")
SHARD_MASK = SHARDS - 1
GHOST_MIN = 4096
_GHOST_RATIO = 10  # of the tier's blocks,
_GHOST_MANY = 1 << 18  # but no more than this, or than the tier's blocks
TOUCHED_MAX = 4096  # blocks that others than their chain used
_STEP = 1024  # keys copied between two pauses: 0.2 ms

Chains = npt.NDArray[np.int64]


def ghost_limit(rows: int) -> int:
    """Return how many removed keys one generation remembers for a tier of `rows` blocks."""
    return max(GHOST_MIN, min(_GHOST_RATIO * rows, max(_GHOST_MANY, rows)))


class Shard:
    """A part of the removed keys that are remembered, in two generations. Each maps a key to its chain and fan-out (how
    many different blocks follow it), packed in one int."""

    __slots__ = ("old", "young")

    def __init__(self) -> None:
        self.young: dict[bytes, int] = {}
        self.old: dict[bytes, int] = {}


class ChainGhost:
    """A record of one tenant's removed blocks: the chain of each key, and how many different blocks follow it
    (fan-out). It holds between `limit` and twice `limit` keys; `limit` may be changed at any time. `forgetting` is
    called with the chains of forgotten keys."""

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
        """Remember how often other chains than its own used the removed block `key`. `touches` is a decayed count as of
        the time `as_of_s`. Without this, a shared prefix that was evicted would be evicted first each time it is stored
        again."""
        touched = self.touched
        touched.pop(key, None)
        touched[key] = touches, as_of_s
        if len(touched) > TOUCHED_MAX:
            del touched[next(iter(touched))]

    def remember_run(self, keys: Sequence[bytes | None], chain: int, fans: Sequence[int]) -> None:
        """Remember that the removed blocks `keys` belong to `chain`. `fans` has at the same position how many different
        blocks follow each of them. A key that is None is left out."""
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
        """Return the packed entry (chain and fan-out) of each of `keys`, or -1 when it is not remembered."""
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
        """Return the packed entry (chain and fan-out) of `key`, or -1 when it is not remembered."""
        shard = self.shards[key[-1] & SHARD_MASK]
        packed = shard.young.get(key)
        return shard.old.get(key, NOTHING) if packed is None else packed

    def owner_of(self, key: bytes) -> int:
        """Return the number of the chain of the removed block `key`, or -1 when it is not remembered."""
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
        """Yield the newest entries to save, at most `most`, in steps: a generation ("young" or "old"), packed keys, and
        their packed entries. Other tasks may run between two steps; their changes may be included or not."""
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
        """Put the saved entries `packed` of `keys` (dtype V16) back into `generation`, "young" or "old"."""
        at = np.ascontiguousarray(keys).view(np.uint8).reshape(-1, 16)[:, -1] & SHARD_MASK
        order = np.argsort(at, kind="stable")
        ends = np.cumsum(np.bincount(at, minlength=SHARDS)).tolist()
        names, values = keys[order].tolist(), packed[order].tolist()
        for shard, first, last in zip(self.shards, [0, *ends], ends, strict=False):
            getattr(shard, generation).update(zip(names[first:last], values[first:last], strict=True))

    def chains(self, shard: int) -> Chains:
        """Return the chain of every key in the shard with the number `shard`, as an array."""
        both = self.shards[shard]
        return np.concatenate([_chains(both.young), _chains(both.old)])


def _chains(keys: dict[bytes, int]) -> Chains:
    return np.fromiter(keys.values(), np.int64, len(keys)) >> FAN_BITS


_UNOWNED = -1
_END_BLOCKS, _END_SHARE = 2, 0.05  # of a chain, which may be left out
_GAP_MAX = 64  # blocks that are not in the tier


class Path(NamedTuple):
    """The blocks of a request as the policy knew them before it: the stored ones, then the missing ones. The first
    `known` blocks had an owner. `chain` owned the last of these, which `fan` other blocks follow; `pivot` is its row,
    or -1."""

    before: list[int]  # owners
    fans: list[int]  # what the ghost knows of those that are missing: how many others follow each
    known: int
    first: int  # depth of the first
    pivot: int
    chain: int
    fan: int


def path_of(
    rows: Sequence[int],
    missing: Sequence[bytes],
    parent: int,
    columns: RowColumns,
    owner: array[int],
    fans: bytearray,
    ghost: ChainGhost,
) -> Path:
    """Return what the policy knows of a request's blocks before it takes the request in: stored blocks in `rows`, then
    blocks with the keys `missing`, which continue the row `parent` if `rows` is empty. It changes nothing."""
    here, span = len(rows), span_of(rows)
    before = [owner[row] for row in rows] if span is None else owner[span].tolist()
    lost: list[int] = []
    if missing:
        lost = ghost.recall_run(missing)
        before += [packed >> FAN_BITS for packed in lost]
        lost = [packed & FAN_MAX if packed >= 0 else 0 for packed in lost]
    known = before.index(_UNOWNED) if _UNOWNED in before else len(before)
    if here:
        first, parent = columns.depth[rows[0]], columns.parent[rows[0]]
    else:
        first = columns.depth[parent] + 1 if parent >= 0 else 0
    pivot = rows[min(known, here) - 1] if known and here else -1
    if not known and first:
        pivot = parent
        if pivot >= len(owner) or (pivot >= 0 and owner[pivot] < 0):
            pivot = -1
    if known > here:  # where the known part ends there is no row any more
        chain, fan = before[known - 1], lost[known - here - 1]
    else:
        chain, fan = (owner[pivot], fans[pivot]) if pivot >= 0 else (-1, 0)
    return Path(before, lost, known, first, pivot, chain, fan)


def next_above(row: int, chain: int, columns: RowColumns, owner: array[int]) -> int:
    """Return the nearest row before `row` in its chain of blocks that `chain` owns, passing over rows that are not in
    the tier. Return -1 if there is none."""
    parents, known = columns.parent, len(owner)
    row = parents[row]
    for _ in range(_GAP_MAX):
        if row < 0 or row >= known:
            return -1
        if owner[row] != _UNOWNED:
            return row if owner[row] == chain else -1
        row = parents[row]
    return -1


def is_near_end(reach: int, length: int) -> bool:
    """Return whether a request that uses the first `reach` blocks of a chain of `length` blocks has used nearly all of
    it.
    """
    missing = length - reach
    return missing <= 1 or (missing < reach and missing <= max(_END_BLOCKS, _END_SHARE * length))
