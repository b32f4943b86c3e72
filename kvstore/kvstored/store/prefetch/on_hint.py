"""Predicts by engines' hints, as far as they were right before: a chain is due about when its engine said so.

A hint with a due time makes a guess. For each tenant the module remembers how late announced requests came
(`Lateness`), and how many did not come; so the guess of an engine that is always right is sure and sharp, and the guess
of another engine is spread over the time in which its requests come. A tool call without a due time makes one, too,
once the tenant's pauses after such calls are known: it counts as due at once, and its lateness is the pause. The
request, another hint, a closed session, or time ends a guess. Bounded: the oldest hints are forgotten.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, nlargest
from itertools import count
from math import inf

import numpy as np

from kvstore_predictor.base import Array, Guess, Hint, NextStep, Piece, Predictor, PredictorRequest, parts

HINTS_MAX = 8192  # a look at one costs the control thread up to 50 us, four times a second
LATE_S = 30.0  # a request that does not come so long after it was due, or after twice its pause, does not come
LOOKED_AT = 0.5  # of the time that was announced: before it has passed nothing is guessed
SHORT_S = 5.0  # lateness is a share of the pause that was announced, or of this where that was shorter
REMEMBERED = 128  # requests of a tenant
AT_FIRST = (-0.05, -0.01, 0.0, 0.0, 0.0, 0.0, 0.01, 0.05, 0.5)  # taken for known before any came: engines are right
AFTER_CALLS = (inf,) * 8  # ... and of tool calls: that nothing comes soon
DOUBT = 0.5  # as many more requests that will not come
FIRST, MIDDLE = 0.1, 0.5
TENANTS_MAX = 4096
BEFORE_MAX = 16_384
COPIED = 256  # rows of a piece
LATE = np.dtype([("tenant", "i8"), ("share", "f8")])  # the oldest first; ~tenant: after tool calls
DUE = np.dtype(
    [
        ("tenant", "i8"), ("key", "V16"), ("above", "V16"), ("due_s", "f8"), ("pause_s", "f8"), ("probability", "f8"),
        ("is_call", "?"),
    ]
)  # fmt: skip

_Chain = tuple[int, bytes]


class Lateness:
    """A record of how late the announced requests of one tenant came. A value is the delay divided by the announced
    pause; inf stands for a request that did not come."""

    def __init__(self, latest: Iterable[float] = AT_FIRST) -> None:
        self._latest = deque(latest)
        self._sorted = sorted(self._latest)

    def add(self, share: float) -> None:
        if len(self._latest) == REMEMBERED:
            del self._sorted[bisect_right(self._sorted, self._latest.popleft()) - 1]
        self._latest.append(share)
        insort(self._sorted, share)

    @property
    def latest(self) -> list[float]:
        """The recorded values, the oldest first."""
        return list(self._latest)

    def between(self, after: float, until: float) -> tuple[float, float, float]:
        """Return three numbers about the recorded requests whose lateness is above `after`: the chance that it is at
        most `until`, and, of those, the lateness that a tenth and that a half of them do not exceed."""
        known = self._sorted
        begin, end = bisect_right(known, after), bisect_right(known, until)
        if end <= begin:
            return 0.0, inf, inf
        first, middle = (known[begin + int(part * (end - begin))] for part in (FIRST, MIDDLE))
        return (end - begin) / (len(known) - begin + DOUBT), first, middle


@dataclass(frozen=True, slots=True)
class _Due:
    due_s: float
    pause_s: float  # that was announced
    probability: float
    number: int
    names: tuple[_Chain, ...]
    is_call: bool  # a tool call without a due time

    @property
    def scale_s(self) -> float:
        return max(self.pause_s, SHORT_S)

    @property
    def over_s(self) -> float:
        return self.due_s + max(LATE_S, self.pause_s)


class OnHint(Predictor):
    """The predictor on-hint: it predicts the requests that engines announce by hints, with the probability that such
    announcements were right before. An event takes logarithmic time; `guesses` takes time in proportion to the hints
    half of whose announced pause has passed."""

    name = "on-hint"

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self._restored = 0  # hints of a lower number are of a former process
        self._began_s = inf  # when this one was first asked
        self._due: OrderedDict[_Chain, _Due] = OrderedDict()
        self._names: dict[_Chain, _Chain] = {}  # of the chains that are due: their last block, and the last but one
        self._before: OrderedDict[_Chain, bytes] = OrderedDict()  # by the last block of a request, the last but one
        self._ends: dict[_Chain, set[bytes]] = {}  # by the last but one, the last blocks of those in `_before`
        self._later: list[tuple[float, int, _Chain]] = []  # heap; what is outdated is left out when it is met
        self._soon: dict[_Chain, None] = {}
        self._lateness: OrderedDict[int, Lateness] = OrderedDict()
        self._numbers = count()

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        tenant, keys = request.tenant, request.keys
        self._began_s = min(self._began_s, now_s)
        if self._due:
            names = self._names
            named = dict.fromkeys(names[tenant, key] for key in keys if (tenant, key) in names)
            came = [due for chain in named if (due := self._drop(chain)) is not None]
            if came:  # the deepest is the request's own; of the others another was meant, perhaps
                self._judge(tenant, came[-1], (now_s - came[-1].due_s) / came[-1].scale_s)
        if len(keys) > 1:
            self._forget_before((tenant, keys[-1]))
            self._before[tenant, keys[-1]] = keys[-2]
            self._ends.setdefault((tenant, keys[-2]), set()).add(keys[-1])
            if len(self._before) > BEFORE_MAX:
                self._forget_before(next(iter(self._before)))

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        chain = (tenant, key)
        if hint.next_step is NextStep.CLOSED or hint.will_continue == 0.0:
            self._drop(chain)
        elif hint.due_s is not None:
            pause_s, chance = max(hint.due_s - now_s, 0.0), 1.0 if hint.will_continue is None else hint.will_continue
            self._expect(chain, self._before.get(chain, key), hint.due_s, pause_s, chance)
        elif hint.next_step is NextStep.TOOL_CALL and ((due := self._due.get(chain)) is None or due.is_call):
            chance = 1.0 if hint.will_continue is None else hint.will_continue
            self._expect(chain, self._before.get(chain, key), now_s, 0.0, chance, is_call=True)

    def _expect(
        self, chain: _Chain, above: bytes, due_s: float, pause_s: float, chance: float, *, is_call: bool = False
    ) -> None:
        self._drop(chain)
        if len(self._due) >= HINTS_MAX:
            self._drop(next(iter(self._due)))
        names = tuple((chain[0], name) for name in {chain[1], above})
        self._due[chain] = due = _Due(due_s, pause_s, chance, next(self._numbers), names, is_call)
        for name in names:  # the last block may be partial: then the next request has the last but one
            self._names[name] = chain
        heappush(self._later, self._entry(chain, due))
        if len(self._later) > 2 * HINTS_MAX:
            self._later = [self._entry(*each) for each in self._due.items() if each[0] not in self._soon]
            heapify(self._later)

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        self._began_s = min(self._began_s, now_s)
        while self._later and self._later[0][0] <= now_s + horizon_s:
            self._soon[heappop(self._later)[2]] = None
        found: list[Guess] = []
        for chain in list(self._soon):
            due = self._due.get(chain)
            if due is None:
                del self._soon[chain]
            elif now_s > due.over_s:
                self._drop(chain)
                self._judge(chain[0], due, inf)
            elif (guess := self._guess(chain, due, now_s, horizon_s)) is not None:
                found.append(guess)
        return nlargest(limit, found, key=lambda guess: (guess.probability, -guess.due_s, guess.key))

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        if keys is None:
            chains = [chain for chain in self._due if chain[0] == tenant]
            before = [name for name in self._before if name[0] == tenant]
        else:
            gone = [(tenant, key) for key in keys]
            chains = [self._names[name] for name in gone if name in self._names]
            before = [*gone, *((tenant, end) for name in gone for end in self._ends.get(name, ()))]
        for chain in chains:
            self._drop(chain)
        for name in before:
            self._forget_before(name)

    def export_state(self) -> Iterator[Piece]:
        lateness = ((tenant, share) for tenant, of in list(self._lateness.items()) for share in of.latest)
        expected = (
            (*chain, next((name for _, name in due.names if name != chain[1]), chain[1]), due.due_s, due.pause_s,
             due.probability, due.is_call)
            for chain, due in list(self._due.items())
            if self._due.get(chain) is due
        )  # fmt: skip
        tables: tuple[tuple[str, np.dtype[np.void], Iterator[tuple[object, ...]]], ...] = (
            ("late", LATE, lateness), ("due", DUE, expected),
        )  # fmt: skip
        for name, dtype, rows in tables:
            for part in parts(rows, dtype, COPIED):
                yield name, part

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        late, expected = state.get("late"), state.get("due")
        if late is None or late.dtype != LATE or expected is None or expected.dtype != DUE:
            raise ValueError("the state of another version")
        self._reset()
        shares: dict[int, deque[float]] = {}
        for tenant, share in late.tolist():
            shares.setdefault(tenant, deque(maxlen=REMEMBERED)).append(share)
        for tenant, latest in shares.items():
            self._lateness[tenant] = Lateness(latest)
        for tenant, key, above, due_s, pause_s, chance, is_call in expected.tolist():
            self._expect((tenant, key), above, due_s + later_s, pause_s, chance, is_call=is_call)
        self._restored = len(expected)

    def _judge(self, tenant: int, due: _Due, late: float) -> None:
        """Learn how late a request came. A request that fell due while there was no daemon teaches nothing."""
        if due.number >= self._restored or due.due_s >= self._began_s:
            self._of(tenant, due).add(late)

    def _guess(self, chain: _Chain, due: _Due, now_s: float, horizon_s: float) -> Guess | None:
        scale_s = due.scale_s
        since = (now_s - due.due_s) / scale_s
        chance, first, middle = self._of(chain[0], due).between(since, since + horizon_s / scale_s)
        if not chance:
            return None
        first_s, due_s = (max(now_s, due.due_s + late * scale_s) for late in (first, middle))
        return Guess(*chain, 0, due.probability * chance, first_s, due_s, 1.0)

    def _drop(self, chain: _Chain) -> _Due | None:
        due = self._due.pop(chain, None)
        if due is not None:
            self._soon.pop(chain, None)
            for name in due.names:
                if self._names.get(name) == chain:
                    del self._names[name]
        return due

    def _forget_before(self, chain: _Chain) -> None:
        above = self._before.pop(chain, None)
        if above is not None:
            ends = self._ends[chain[0], above]
            ends.discard(chain[1])
            if not ends:
                del self._ends[chain[0], above]

    def _of(self, tenant: int, due: _Due) -> Lateness:
        number = ~tenant if due.is_call else tenant
        found = self._lateness.get(number)
        if found is None:
            found = self._lateness[number] = Lateness(AFTER_CALLS if due.is_call else AT_FIRST)
            if len(self._lateness) > TENANTS_MAX:
                self._lateness.popitem(last=False)
        return found

    @staticmethod
    def _entry(chain: _Chain, due: _Due) -> tuple[float, int, _Chain]:
        return due.due_s - LOOKED_AT * due.pause_s, due.number, chain
