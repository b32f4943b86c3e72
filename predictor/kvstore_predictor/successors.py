"""Which symbol follows which: counts after contexts of one to three symbols, mixed as in PPM.

A long context is believed as far as it has been seen (Cleary and Witten, IEEE Trans. Comm. 32, 1984); what is left goes
to the next shorter one. Counts decay with every use of their context. Symbols are numbers; never knows keys or tenants.
Bounded: `contexts_max` contexts with at most `_FOLLOWERS` followers each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_predictor.generations import Generations

ORDER = 3
_FOLLOWERS = 4
_DECAY = 0.95
_ESCAPE = 1.0  # how much a context has to be seen to weigh as much as the shorter ones
_BEAM, _LEAST = 8, 0.01  # paths that are followed further, and of what chance
FOLLOWER = np.dtype([("context", "i8", (ORDER,)), ("symbol", "i8"), ("count", "f8"), ("gap_s", "f8")])


class Follower(NamedTuple):
    """`chance`: that it comes next; `gap_s`: how long after."""

    symbol: int
    chance: float
    gap_s: float


class Successors:
    """See the module."""

    def __init__(self, contexts_max: int) -> None:
        self._of = Generations[tuple[int, ...], dict[int, list[float]]](contexts_max)  # counts and mean gaps

    def __len__(self) -> int:
        return len(self._of)

    def came(self, history: tuple[int, ...], symbol: int, gap_s: float) -> None:
        """`symbol` came `gap_s` after the last symbol of `history`."""
        of = self._of
        for length in range(1, len(history) + 1):
            context = history[-length:]
            followers = of.renewed(context)
            if followers is None:
                of[context] = {symbol: [1.0, gap_s]}
                continue
            for each in followers.values():
                each[0] *= _DECAY
            known = followers.get(symbol)
            if known is None:
                if len(followers) >= _FOLLOWERS:
                    del followers[min(followers, key=lambda each: followers[each][0])]
                followers[symbol] = [1.0, gap_s]
            else:
                known[0] += 1.0
                known[1] += (gap_s - known[1]) / min(known[0], 8.0)

    def next(self, history: Sequence[int]) -> list[Follower]:
        """What may come after `history`, by the longest contexts first."""
        left, found = 1.0, dict[int, tuple[float, float]]()
        for length in range(len(history), 0, -1):
            followers = self._of.get(tuple(history[-length:]))
            if not followers:
                continue
            total = sum(count for count, _ in followers.values())
            for symbol, (count, gap_s) in followers.items():
                known, own = found.get(symbol, (0.0, gap_s)), left * count / (total + _ESCAPE)
                found[symbol] = (known[0] + own, known[1])
            left *= _ESCAPE / (total + _ESCAPE)
        return [Follower(symbol, chance, gap_s) for symbol, (chance, gap_s) in found.items()]

    def ahead(self, history: Sequence[int], until_s: float) -> list[Follower]:
        """What may come by `until_s` after the last symbol of `history`, by the likeliest paths. `gap_s`: since it."""
        best: dict[int, Follower] = {}
        paths = [(1.0, 0.0, tuple(history))]
        for _ in range(4 * _BEAM):
            longer: list[tuple[float, float, tuple[int, ...]]] = []
            for chance, after_s, path in paths:
                for each in self.next(path):
                    own, at_s = chance * each.chance, after_s + each.gap_s
                    if own < _LEAST or after_s > until_s:
                        continue
                    known = best.get(each.symbol)
                    if known is None or own > known.chance:
                        best[each.symbol] = Follower(each.symbol, own, at_s)
                        longer.append((own, at_s, (*path, each.symbol)[-ORDER:]))
            paths = sorted(longer, reverse=True)[:_BEAM]
            if not paths:
                break
        return list(best.values())

    def rows(self) -> Iterator[tuple[tuple[int, ...], int, float, float]]:
        """All of it (of dtype FOLLOWER), contexts padded with -1. What comes meanwhile may be in it or not."""
        for context in self._of.names():
            padded = (-1,) * (ORDER - len(context)) + context
            for symbol, (count, gap_s) in list((self._of.get(context) or {}).items()):
                yield padded, symbol, count, gap_s

    def restore(self, rows: npt.NDArray[np.void]) -> None:
        for context, symbol, count, gap_s in rows.tolist():
            known = tuple(int(each) for each in context if each >= 0)
            followers = self._of.get(known) or {}
            followers[symbol] = [count, gap_s]
            self._of[known] = followers
