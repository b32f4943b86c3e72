"""Which chain a block belonged to that is gone: so that a session which returns after its eviction is known, and
teaches.

Two generations of keys: what is remembered goes to the young one; when that is full it becomes the old one, and the
old one is forgotten. So between `limit` and twice `limit` keys, without the cost of an order. Knows no rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_FAN_BITS = 3
FAN_MAX = (1 << _FAN_BITS) - 1


class ChainGhost:
    """Key → chain and fan-out, in one int each. One for each tenant."""

    __slots__ = ("_old", "_young", "room")

    def __init__(self, limit: int) -> None:
        self.room = limit  # until the young generation is full
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def remember(self, key: bytes, chain: int, fan: int) -> None:
        self._young[key] = chain << _FAN_BITS | fan
        self.room -= 1

    def recall(self, key: bytes) -> tuple[int, int]:
        """Chain and fan-out, or (-1, 0)."""
        packed = self._young.get(key)
        if packed is None:
            packed = self._old.get(key)
            if packed is None:
                return -1, 0
        return packed >> _FAN_BITS, packed & FAN_MAX

    def turn_over(self, limit: int) -> None:
        """Forget the old generation; the young one is old now, and the next one has room for `limit` keys."""
        self._old, self._young = self._young, {}
        self.room = limit

    def chains(self) -> npt.NDArray[np.int64]:
        """Of every key that is remembered."""
        young = np.fromiter(self._young.values(), np.int64, len(self._young))
        old = np.fromiter(self._old.values(), np.int64, len(self._old))
        return np.concatenate([young, old]) >> _FAN_BITS
