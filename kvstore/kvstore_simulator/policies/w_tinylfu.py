"""W-TinyLFU: a new block stays only if it was used more often lately than the block it would replace; leaf-first.

Einziger, Friedman, Manes: "TinyLFU: a highly efficient cache admission policy", ACM TOS 13(4), 2017, as in Caffeine.
New blocks enter a window, an LRU queue of a hundredth of the tier. A block that drops out of it competes with the
oldest block of the main part, and the one whose key was seen less often is evicted. The main part is a segmented LRU,
four fifths of it for blocks used there. So admission is part of the choice of the victim. A tier counts as full from
the first time that a victim is asked for; until then everything enters the main part. If room was made before a block
came, it competes with the next victim. A bad choice for sessions: a new turn's blocks have been seen once and lose
against any old ones that were seen twice. Good if few prompts are shared by many requests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvstored.store.policies.queued import Discipline, Queues, first_of

_COUNT_MAX = 15
_SAMPLE = 10  # uses a counter's column sees before all are halved
_MIX = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_HALF = bytes(count >> 1 for count in range(256))
_SEEDS = (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F, 0xCBF29CE484222325)


class FrequencySketch:
    """A small table that estimates how often each of about `keys` different keys was used lately, in four rows of
    saturating counters, halved now and then (Cormode, Muthukrishnan: J. Algorithms 55(1), 2005; the halving is
    TinyLFU's). Apart from the halving, a count may be too high and is never too low.
    """

    def __init__(self, keys: int) -> None:
        self._bits = max(10, (keys - 1).bit_length())
        self._rows = [bytearray(2**self._bits) for _ in _SEEDS]
        self._left = _SAMPLE << self._bits

    @property
    def keys(self) -> int:
        return len(self._rows[0])

    def add(self, key: bytes) -> None:
        shift, hashed = 64 - self._bits, _hash(key)
        for row, seed in zip(self._rows, _SEEDS, strict=True):
            at = (hashed * seed & _MASK64) >> shift
            if row[at] < _COUNT_MAX:
                row[at] += 1
        self._left -= 1
        if not self._left:
            self._rows = [row.translate(_HALF) for row in self._rows]
            self._left = (_SAMPLE << self._bits) // 2

    def count(self, key: bytes) -> int:
        shift, hashed = 64 - self._bits, _hash(key)
        return min(row[(hashed * seed & _MASK64) >> shift] for row, seed in zip(self._rows, _SEEDS, strict=True))


def _hash(key: bytes) -> int:
    mixed = int.from_bytes(key[8:], "little") * _MIX & _MASK64
    return mixed ^ mixed >> 32


_WINDOW, _ARRIVED, _TRIAL, _KEPT, _DOOR = range(5)
_WINDOW_SHARE = 100
_KEPT_SHARE = 0.8
_FIRST_KEYS = 1024


class WTinyLfu(Discipline):
    """The W-TinyLFU policy: a new block stays only if it was used more often lately than the block that it would
    replace. An event costs O(1); a use also updates four counters.
    """

    inside = 4

    def __init__(self, queues: Queues) -> None:
        super().__init__(queues)
        self._seen = FrequencySketch(_FIRST_KEYS)
        self._is_full = False
        self._was_full = False  # the rows that wait were stored in a full tier
        self._has_won = False  # or there was room
        self._arrived = -1  # the row that waited while the victim was in its queue

    def arriving(self) -> None:
        self._was_full = self._is_full

    def stored(self, rows: Sequence[int], held: int) -> None:
        if held > self._seen.keys:
            self._seen = FrequencySketch(2 * held)  # what was counted with too few counters is worth little
        for row in rows:
            self._seen.add(self.key(row))

    def leaving(self, row: int, tenant: int) -> None:
        self._arrived = self.queues.of[tenant][_ARRIVED].front
        self._has_won = True

    def left(self, queue: int, tenant: int) -> None:
        self._has_won = False
        if queue in (_TRIAL, _KEPT) and self._arrived >= 0:
            self.queues.move(self._arrived, tenant, _TRIAL)

    def entrance(self, row: int, tenant: int) -> int:
        """Return the number of the queue that every new block enters, which is the window; `row` is the block's row
        number. If the window of `tenant` is too long, its oldest blocks are moved first: to the main queues, or to a
        comparison with the oldest block there.
        """
        window = self.queues.of[tenant][_WINDOW]
        while window and self._is_window_full(tenant):
            self.queues.move(window.front, tenant, _TRIAL if self._has_won or not self._is_full else _ARRIVED)
        return _WINDOW

    def _is_window_full(self, tenant: int) -> bool:
        sizes = self.queues.sizes[tenant]
        return sizes[_WINDOW] >= max(1, sum(sizes) // _WINDOW_SHARE)

    def used(self, row: int, tenant: int) -> None:
        self._seen.add(self.key(row))
        if self.queues.queue_of[row] in (_WINDOW, _ARRIVED):
            self.queues.move(row, tenant, self.queues.queue_of[row])
            return
        self.queues.move(row, tenant, _KEPT)
        sizes = self.queues.sizes[tenant]
        while sizes[_KEPT] > max(1, _KEPT_SHARE * (sizes[_TRIAL] + sizes[_KEPT])) and self.queues.of[tenant][_KEPT]:
            self.queues.move(self.queues.of[tenant][_KEPT].front, tenant, _TRIAL)

    def candidate(self, tenant: int, refused: Collection[int]) -> int:
        self._is_full = True
        queues = self.queues.of[tenant]
        window, newcomer, trial, kept = (first_of(queue, refused) for queue in queues[:_DOOR])
        old = trial if trial >= 0 else kept
        if newcomer < 0 and queues[_DOOR] and self._was_full and self._is_window_full(tenant):
            newcomer = window  # about to drop out
        if newcomer >= 0 and old >= 0:
            return old if self._count(newcomer) > self._count(old) else newcomer
        return next((row for row in (newcomer, trial, window, kept) if row >= 0), -1)

    def _count(self, row: int) -> int:
        return self._seen.count(self.key(row))
