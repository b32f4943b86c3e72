"""Repeated requests that form no session: documents asked for in a cycle, fixed sequences of prompts.

A *document* is a prefix that was requested twice: the deepest of depths 1, 2, 4, 8, ... that an earlier request had,
too, or the end of the common part of two requests in a row, if that is near the last one's end. Two things are learned:
which document follows which (`Successors`), and the time until a document is requested again (log-logistic, its mean
and spread learned for each). Of the two chances, the greater is the guess.

The module owns documents and their intervals. Bounded: `documents_max` documents, four times as many marks and
contexts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_predictor.ages import Floats
from kvstore_predictor.base import Array, Guess, Piece, Predictor, PredictorRequest, parts
from kvstore_predictor.generations import Generations

ORDER = 3
_FOLLOWERS = 4
_DECAY = 0.95
_ESCAPE = 1.0  # how much a context has to be seen to weigh as much as the shorter ones
_BEAM, _PATH_LEAST = 8, 0.01  # paths that are followed further, and of what chance
FOLLOWER = np.dtype([("context", "i8", (ORDER,)), ("symbol", "i8"), ("count", "f8"), ("gap_s", "f8")])


class Successor(NamedTuple):
    """A symbol (a document's number) that may come next, its `chance`, and the seconds `gap_s` until then."""

    symbol: int
    chance: float
    gap_s: float


class Successors:
    """Counts of which symbol (the number of a document) follows which contexts of one to three symbols, mixed as in PPM
    (Cleary and Witten, IEEE Trans. Comm. 32, 1984): often seen long contexts weigh most. Counts decay with every use of
    their context. At most `contexts_max` contexts are kept, with at most `_FOLLOWERS` followers each.
    """

    def __init__(self, contexts_max: int) -> None:
        self._of = Generations[tuple[int, ...], dict[int, list[float]]](contexts_max)  # counts and mean gaps

    def __len__(self) -> int:
        return len(self._of)

    def came(self, history: tuple[int, ...], symbol: int, gap_s: float) -> None:
        """Count that `symbol` came `gap_s` seconds after the last symbol of `history`."""
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

    def next(self, history: Sequence[int]) -> list[Successor]:
        """Return the symbols that may come next after the symbols `history`. Longer contexts have more weight."""
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
        return [Successor(symbol, chance, gap_s) for symbol, (chance, gap_s) in found.items()]

    def ahead(self, history: Sequence[int], until_s: float) -> list[Successor]:
        """Return the symbols that may come within `until_s` seconds after the last one of `history`, by likely
        paths.
        """
        best: dict[int, Successor] = {}
        paths = [(1.0, 0.0, tuple(history))]
        for _ in range(4 * _BEAM):
            longer: list[tuple[float, float, tuple[int, ...]]] = []
            for chance, after_s, path in paths:
                for each in self.next(path):
                    own, at_s = chance * each.chance, after_s + each.gap_s
                    if own < _PATH_LEAST or after_s > until_s:
                        continue
                    known = best.get(each.symbol)
                    if known is None or own > known.chance:
                        best[each.symbol] = Successor(each.symbol, own, at_s)
                        longer.append((own, at_s, (*path, each.symbol)[-ORDER:]))
            paths = sorted(longer, reverse=True)[:_BEAM]
            if not paths:
                break
        return list(best.values())

    def rows(self) -> Iterator[tuple[tuple[int, ...], int, float, float]]:
        """Yield all counts as rows of the dtype FOLLOWER; short contexts are padded with -1. Counts that change
        meanwhile may be included or not.
        """
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


FORMAT = 1
_TAIL = 4  # blocks at the end of a request in which its question may be
_TENANTS_MAX = 1024
_SPREAD, _SPREAD_MIN = 0.8, 0.15  # of the logarithm of an interval: before it is known, and the least
_STEP_SPREAD = 0.5  # of the time of a foreseen follower
_LEAST = 0.01
_COPIED = 128  # rows of a piece
_SLOPE = math.pi / math.sqrt(3.0)
DOCUMENT = np.dtype(
    [
        ("tenant", "i8"), ("mark", "V16"), ("key", "V16"), ("depth", "i4"), ("number", "i8"), ("uses", "f8"),
        ("returns", "f8"), ("mean", "f8"), ("spread", "f8"), ("last_s", "f8"),
    ]
)  # fmt: skip
MARK = np.dtype([("tenant", "i8"), ("key", "V16"), ("last_s", "f8")])
HISTORY = np.dtype([("tenant", "i8"), ("numbers", "i8", (ORDER,)), ("last_s", "f8")])
Name = tuple[int, bytes]  # tenant and key


class _Document:
    """A document. `mark`: the key that identifies it; `key`, `depth`: the end of the part that is requested again.
    `mean`, `spread`: the mean and the spread of the logarithm of the seconds between two requests.
    """

    __slots__ = (
        "blocks", "depth", "key", "last_s", "mark", "mean", "number", "returns", "spread", "tail", "tenant", "uses",
    )  # fmt: skip

    def __init__(self, tenant: int, mark: bytes, depth: int, number: int) -> None:
        self.tenant, self.mark, self.number = tenant, mark, number
        self.key, self.depth = mark, depth
        self.tail: Sequence[bytes] = ()  # the last keys of its last request, which had so many `blocks`
        self.blocks = 0
        self.uses, self.returns, self.mean, self.spread, self.last_s = 1.0, 0.0, 0.0, _SPREAD, 0.0

    def used(self, now_s: float, gap_s: float) -> None:
        value = math.log(max(gap_s, 0.05))
        self.returns += 1.0
        weight = 1.0 / min(self.returns, 8.0)
        apart = value - self.mean if self.returns > 1.0 else 0.0
        self.mean = self.mean + weight * apart if self.returns > 1.0 else value
        self.spread += 0.25 * (abs(apart) - self.spread) if self.returns > 1.0 else 0.0
        self.uses, self.last_s = self.uses + 1.0, now_s


class Markov(Predictor):
    """A predictor of documents (prefixes that were requested at least twice) that are requested again or follow each
    other in a fixed order. It knows `documents_max` documents.
    """

    name = "markov"

    def __init__(self, documents_max: int = 1 << 13) -> None:
        self._max = documents_max
        self._documents: OrderedDict[Name, _Document] = OrderedDict()
        self._by_number: dict[int, _Document] = {}
        self._by_key: dict[Name, set[bytes]] = {}  # marks of documents that end with another block than their mark
        self._marks = Generations[Name, float](4 * documents_max)
        self._history: dict[int, tuple[tuple[int, ...], float]] = {}
        self._numbers = 0
        self._successors = Successors(4 * documents_max)

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        keys, tenant, marks = request.keys, request.tenant, self._marks
        if not keys:
            return
        depth = 1 << (len(keys).bit_length() - 1)
        last_s = None
        while depth:
            name = (tenant, keys[depth - 1])
            last_s = marks.pop(name)
            marks[name] = now_s
            if last_s is not None:
                break
            depth >>= 1
        if last_s is None:
            return
        document = self._document(tenant, keys[depth - 1], depth)
        document.used(now_s, now_s - last_s)
        self._name(document, *_end(document, keys, depth))
        document.tail, document.blocks = keys[-_TAIL:], len(keys)
        history, before_s = self._history.pop(tenant, ((), now_s))
        self._successors.came(history, document.number, now_s - before_s)
        self._history[tenant] = ((*history, document.number)[-ORDER:], now_s)
        if len(self._history) > _TENANTS_MAX:
            del self._history[next(iter(self._history))]

    def _name(self, document: _Document, key: bytes, depth: int) -> None:
        """Set the end of the part of `document` that is requested again."""
        if key != document.key:
            self._unname(document)
            if key != document.mark:
                self._by_key.setdefault((document.tenant, key), set()).add(document.mark)
        document.key, document.depth = key, depth

    def _unname(self, document: _Document) -> None:
        marks = self._by_key.get((document.tenant, document.key))
        if marks is not None:
            marks.discard(document.mark)
            if not marks:
                del self._by_key[document.tenant, document.key]

    def _document(self, tenant: int, mark: bytes, depth: int) -> _Document:
        found = self._documents.pop((tenant, mark), None)
        if found is None:
            found = _Document(tenant, mark, depth, self._numbers)
            self._by_number[self._numbers] = found
            self._numbers += 1
        self._documents[tenant, mark] = found
        if len(self._documents) > self._max:
            self._drop(next(iter(self._documents)))
        return found

    def _drop(self, name: Name) -> None:
        gone = self._documents.pop(name, None)
        if gone is not None:
            self._unname(gone)
            del self._by_number[gone.number]

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        return self._guesses(now_s, horizon_s, limit, 0, 1)

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        step = max(1, len(self._documents) // (2 * count))
        return self._guesses(now_s, horizon_s, count, turn % step, step)

    def _guesses(self, now_s: float, horizon_s: float, limit: int, first: int, step: int) -> list[Guess]:
        """Return guesses from every `step`-th document, and from every `step`-th tenant's last requests."""
        if limit < 1:
            return []
        documents = list(islice(self._documents.values(), first, None, step))
        histories = list(islice(self._history.values(), first % len(self._history) if self._history else 0, None, step))
        found: dict[Name, Guess] = {}
        for each in (*self._again(documents, now_s, horizon_s, limit), *self._next(histories, now_s, horizon_s)):
            name = (each.tenant, each.key)
            if name not in found or each.probability > found[name].probability:
                found[name] = each
        ranked = sorted(found.values(), key=lambda each: (-each.probability, each.tenant, each.key))
        return ranked[:limit]

    def _again(self, documents: Sequence[_Document], now_s: float, horizon_s: float, limit: int) -> Iterator[Guess]:
        """Yield the most probable guesses by the documents' own intervals."""
        if not documents:
            return
        columns = np.array([(each.mean, each.spread, each.last_s, each.returns, each.uses) for each in documents])
        mean, spread, last_s, returns, uses = columns.T
        slope = _SLOPE / np.maximum(1.25 * spread, _SPREAD_MIN)
        comes = returns / (uses + 0.5)  # at all
        age_s = now_s - last_s
        before, after = _come_by(age_s, mean, slope), _come_by(age_s + horizon_s, mean, slope)
        chances = comes * (after - before) / np.maximum(1.0 - comes * before, 1e-9)
        picked = np.flatnonzero(chances >= _LEAST)
        if len(picked) > limit:
            picked = picked[np.argsort(-chances[picked], kind="stable")[:limit]]
        rows = np.stack([each[picked] for each in (chances, before, after, mean, slope, age_s)]).T.tolist()
        for at, (chance, *come_by, middle, steep, age) in zip(picked.tolist(), rows, strict=True):
            each, (begin, end) = documents[at], come_by
            in_s = [_when(begin + part * (end - begin), middle, steep) - age for part in (0.1, 0.5)]
            first_s, due_s = (now_s + min(max(each_s, 0.0), horizon_s) for each_s in in_s)
            yield Guess(each.tenant, each.key, each.depth, min(chance, 1.0), first_s, due_s, _sure(each))

    def _next(
        self, histories: Sequence[tuple[tuple[int, ...], float]], now_s: float, horizon_s: float
    ) -> Iterator[Guess]:
        """Predict the next documents from the contexts of the tenants' last requests."""
        slope = _SLOPE / _STEP_SPREAD
        for history, last_s in histories:
            waited_s = now_s - last_s
            for follower in self._successors.ahead(history, waited_s + horizon_s):
                each = self._by_number.get(follower.symbol)
                if each is None:
                    continue
                mean = np.array([math.log(max(follower.gap_s, 0.05))])
                before, after = (
                    float(_come_by(np.array([age_s]), mean, slope)[0]) for age_s in (waited_s, waited_s + horizon_s)
                )
                chance = follower.chance * (after - before) / max(1.0 - follower.chance * before, 1e-9)
                if chance < _LEAST:
                    continue
                due_s = min(max(last_s + follower.gap_s, now_s), now_s + horizon_s)
                first_s = min(max(last_s + 0.7 * follower.gap_s, now_s), due_s)
                yield Guess(each.tenant, each.key, each.depth, min(chance, 1.0), first_s, due_s, _sure(each))

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        if keys is None:
            self._history.pop(tenant, None)
            for name in [each for each in self._documents if each[0] == tenant]:
                self._drop(name)
            keys = [name[1] for name, _ in self._marks.items() if name[0] == tenant]
        for key in keys:
            name = (tenant, key)
            self._marks.pop(name)
            self._drop(name)
            for mark in list(self._by_key.get(name, ())):
                self._drop((tenant, mark))

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        documents = (
            (each.tenant, each.mark, each.key, each.depth, each.number, each.uses, each.returns, each.mean, each.spread,
             each.last_s)
            for each in list(self._documents.values())
            if self._by_number.get(each.number) is each
        )  # fmt: skip
        seen = ((name, self._marks.get(name)) for name in self._marks.names())
        marks = ((*name, last_s) for name, last_s in seen if last_s is not None)
        histories = (
            (tenant, (-1,) * (ORDER - len(numbers)) + numbers, last_s)
            for tenant, (numbers, last_s) in list(self._history.items())
        )
        tables: Sequence[tuple[str, np.dtype[np.void], Iterator[tuple[Any, ...]]]] = (
            ("documents", DOCUMENT, documents), ("marks", MARK, marks), ("histories", HISTORY, histories),
            ("followers", FOLLOWER, self._successors.rows()),
        )  # fmt: skip
        for name, dtype, rows in tables:
            for part in parts(rows, dtype, _COPIED):
                yield name, part
        yield "numbers", np.array([FORMAT, self._numbers], np.float64)  # last: above all that were given out

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        tables = {"documents": DOCUMENT, "marks": MARK, "histories": HISTORY, "followers": FOLLOWER}
        if any(
            name not in state or state[name].dtype != dtype or state[name].ndim != 1 for name, dtype in tables.items()
        ):
            raise ValueError("the state of another version")
        about = state.get("numbers", np.zeros(0))
        if about.shape != (2,) or about[0] != FORMAT:
            raise ValueError("the state of another version")
        self._numbers, self._documents, self._by_number, self._by_key = int(about[1]), OrderedDict(), {}, {}
        for tenant, mark, key, depth, number, *learned, last_s in state["documents"].tolist()[-self._max :]:
            each = _Document(tenant, mark, depth, number)
            self._name(each, key, depth)
            each.last_s = last_s + later_s
            each.uses, each.returns, each.mean, each.spread = learned
            self._documents[tenant, mark] = self._by_number[number] = each
        self._marks = Generations(4 * self._max)
        for tenant, key, at_s in state["marks"].tolist():
            self._marks[tenant, key] = at_s + later_s
        self._history = {
            tenant: (tuple(int(each) for each in numbers if each >= 0), at_s + later_s)
            for tenant, numbers, at_s in state["histories"].tolist()
        }
        self._successors = Successors(4 * self._max)
        self._successors.restore(state["followers"])


def _end(document: _Document, keys: Sequence[bytes], depth: int) -> tuple[bytes, int]:
    """Return the deepest block near their ends that this request and the last one of `document` share, and its depth;
    otherwise the block at `depth`.
    """
    tail = document.tail
    for key in keys[: -2 * _TAIL - 1 : -1]:
        if key in tail:
            found = document.blocks - len(tail) + 1 + tail.index(key)
            return (key, found) if found > depth else (keys[depth - 1], depth)
    return keys[depth - 1], depth


def _come_by(ages_s: Floats, mean: Floats, slope: Floats | float) -> Floats:
    """Return the share of intervals that are shorter than `ages_s`."""
    steps = np.clip(slope * (np.log(np.maximum(ages_s, 1e-3)) - mean), -50.0, 50.0)
    found: Floats = 1.0 / (1.0 + np.exp(-steps))
    return found


def _when(share: float, mean: float, slope: float) -> float:
    share = min(max(share, 1e-9), 1.0 - 1e-9)
    return math.exp(min(mean + math.log(share / (1.0 - share)) / slope, 30.0))


def _sure(document: _Document) -> float:
    return document.returns / (document.returns + 3.0)
