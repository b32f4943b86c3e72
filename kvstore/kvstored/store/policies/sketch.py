"""A count-min sketch of how often keys were used lately: four rows of small saturating counters, halved now and then.

Cormode, Muthukrishnan: "An improved data stream summary", J. Algorithms 55(1), 2005; the halving is TinyLFU's
(Einziger, Friedman, Manes, ACM TOS 13(4), 2017). It answers too high at times and never too low, but for the halving.
Deterministic.
"""

from __future__ import annotations

_COUNT_MAX = 15
_SAMPLE = 10  # uses a counter's column sees before all are halved
_MIX = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_HALF = bytes(count >> 1 for count in range(256))
_SEEDS = (0xC3A5C85C97CB3127, 0xB492B66FBE98F273, 0x9AE16A3B2F90404F, 0xCBF29CE484222325)


class FrequencySketch:
    """For about `keys` different keys."""

    def __init__(self, keys: int) -> None:
        self._bits = max(10, (keys - 1).bit_length())
        self._rows = [bytearray(1 << self._bits) for _ in _SEEDS]
        self._left = _SAMPLE << self._bits

    @property
    def keys(self) -> int:
        return 1 << self._bits

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
