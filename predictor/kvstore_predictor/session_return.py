"""Predicts which sessions will go on, and when: hazard tables over the sessions' last chains.

Each live chain has a class (turn, length, gap, pace, the engine's reports), each class a chance of return by age. A
guess is the rest of that chance at the chain's age, within the horizon. The tables start from the shipped priors and go
on learning.

The module owns sessions, tables and the time when observations begin to count. It knows no tiers. After END_S without a
request a session is not guessed any more.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from kvstore_predictor.ages import BINS, END_S, Floats, Ints, age_of, at_age, chance, cumulative
from kvstore_predictor.base import Array, Guess, Hint, NextStep, Piece, Predictor, PredictorRequest, State, parts
from kvstore_predictor.features import Features, begun, continued, with_answer, with_hint
from kvstore_predictor.hazards import KINDS, HazardTables
from kvstore_predictor.ladders import STEP, Ladder, ladders_of
from kvstore_predictor.learning import Learner
from kvstore_predictor.prior import shipped
from kvstore_predictor.sessions import AwaitedReturns

_ORDER = ("kind", "new_blocks", "length", "turn", "answer")  # of the table that starts empty
_GAP_MIN_S = 0.5
_RUNNING_MAX = 4096
_BRANCH_MIN = 2  # blocks of others
_EVERY, _STEP_US = 4, 120.0  # one request in four learns, for about so long
_LEAST = 0.002  # a guess of less is none
_LIVE_SHARE = 8  # slots that a sample looks at for each of its guesses
_LATE_S, _DUE_CHANCE = 30.0, 0.95  # of a request that an engine foresees


def starting_ladders() -> list[Ladder]:
    """Return the ladders (counts of chains by ever finer classes) from which learning starts: one for each shipped
    prior, and an empty one. Ladders that predict better get more weight later.
    """
    return [*(Ladder(prior.order, prior.counts) for prior in shipped()), Ladder(_ORDER)]


class SessionReturn(Predictor):
    """A predictor of sessions that go on with another request, which it judges by the time since their last request. It
    remembers the last `requests_max` requests: one for 16 blocks of the store, which takes 64 MB a million blocks.
    """

    name = "session-return"

    def __init__(self, requests_max: int = 1 << 16) -> None:
        self.sessions = AwaitedReturns(requests_max)
        self.learning = Learner(self.sessions, starting_ladders(), ranked=False)
        self.features: list[Features | None] = [None] * self.sessions.slots
        self._running: dict[int, tuple[int, bytes]] = {}  # requests whose answer is awaited: slot and last key

    # Events

    def requested(self, request: PredictorRequest, now_s: float) -> None:
        keys, tenant, tokens = request.keys, request.tenant, request.prompt_tokens or -1
        if not keys:
            return
        sessions, learning, blocks = self.sessions, self.learning, len(keys)
        prev, reach = sessions.find(tenant, keys)
        if prev >= 0:
            gap_s, turn, known = now_s - sessions.used_s[prev], sessions.turn[prev] + 1, sessions.tokens[prev]
            learning.returned(prev, gap_s)
            pace = math.log(max(gap_s, _GAP_MIN_S))
            pace = pace if turn == 2 else 0.5 * (pace + sessions.pace[prev])
            text = max(0, tokens - known) if tokens >= 0 and known >= 0 else None
            features = continued(blocks - reach, blocks, turn, gap_s, math.exp(pace), text)
            fan, marked = 0 if reach == sessions.length[prev] else sessions.fan_of(prev, keys), reach
            sessions.drop(prev)
        else:
            turn, pace, fan, marked, reach = 1, 0.0, 0, 0, sessions.known(tenant, keys)
            features = begun(blocks - reach, blocks, request.prompt_tokens or None, is_branch=reach >= _BRANCH_MIN)
        slot = sessions.take(tenant, keys, fan, marked)
        self.features[slot] = features
        sessions.cell[slot] = learning.tables.cell(features)
        sessions.bin[slot], sessions.length[slot], sessions.turn[slot] = 0, blocks, turn
        sessions.used_s[slot], sessions.pace[slot] = now_s, pace
        sessions.tokens[slot], sessions.answer[slot], sessions.due_s[slot] = tokens, 0, 0.0
        if request.number >= 0:
            self._running[request.number] = (slot, keys[-1])
            if len(self._running) > _RUNNING_MAX:
                del self._running[next(iter(self._running))]
        learning.requests += 1
        if learning.requests % _EVERY == 0 and learning.is_due:
            learning.step(now_s, _STEP_US)

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        slot, key = self._running.pop(number, (-1, b""))
        if output_tokens and slot >= 0 and self.sessions.last[slot] == key:
            features = self._until_now(slot, now_s)
            self._add_answer(slot, output_tokens)
            self._change_class(slot, with_answer(features, output_tokens))

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        slot = self.sessions.by_end(tenant, key)
        if slot < 0:
            return
        if hint.next_step or hint.will_continue is not None or hint.answer_tokens:
            features = self._until_now(slot, now_s)
            if hint.answer_tokens:
                self._add_answer(slot, hint.answer_tokens)
                features = with_answer(features, hint.answer_tokens)
            self._change_class(slot, with_hint(features, hint))
        if hint.due_s is not None:
            self.sessions.due_s[slot] = hint.due_s

    def _until_now(self, slot: int, now_s: float) -> Features:
        """Return the chain's class, after counting its age up to now."""
        features = self.features[slot]
        assert features is not None
        self.learning.grew_older(slot, now_s)
        return features

    def _add_answer(self, slot: int, tokens: int) -> None:
        sessions = self.sessions
        if sessions.tokens[slot] >= 0:
            sessions.tokens[slot] += tokens - sessions.answer[slot]  # not a second answer
            sessions.answer[slot] = tokens

    def _change_class(self, slot: int, features: Features) -> None:
        self.features[slot] = features
        self.sessions.cell[slot] = self.learning.tables.cell(features)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        self.sessions.forget(tenant, keys)

    # Answers

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        return self._guesses(now_s, horizon_s, limit, 0, 1)

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        step = max(1, min(self.sessions.slots, self.learning.requests) // (_LIVE_SHARE * count))
        return self._guesses(now_s, horizon_s, count, turn % step, step)

    def _guesses(self, now_s: float, horizon_s: float, limit: int, begin: int, step: int) -> list[Guess]:
        """Return guesses from the slots `begin`, `begin + step`, and so on."""
        sessions = self.sessions
        used_s, due_s = np.frombuffer(sessions.used_s), np.frombuffer(sessions.due_s)
        is_live, used, due = (
            np.frombuffer(sessions.live, np.bool_)[begin::step],
            used_s[begin::step],
            due_s[begin::step],
        )
        is_due = (due > now_s - _LATE_S) & (due > 0.0)
        slots: Ints = begin + step * np.flatnonzero(is_live & ((used > now_s - END_S) | is_due))
        if not len(slots) or limit < 1:
            return []
        is_due = due_s[slots] > max(now_s - _LATE_S, 0.0)
        cells, rows = np.unique(np.frombuffer(sessions.cell, np.int32)[slots], return_inverse=True)
        table = cumulative(self.learning.tables.hazards(cells.astype(np.int64)))
        ages_s = np.maximum(now_s - used_s[slots], 0.0)
        before = at_age(table, rows, ages_s)
        chances = chance(before, at_age(table, rows, ages_s + horizon_s))
        queued = is_due & (due_s[slots] <= now_s + horizon_s)
        chances[queued] = np.maximum(chances[queued], _DUE_CHANCE)
        picked = np.flatnonzero(chances >= _LEAST)
        if len(picked) > 2 * limit:
            least = np.partition(chances[picked], -limit)[-limit]
            picked = picked[chances[picked] >= least]
        picked = picked[np.lexsort((slots[picked], -chances[picked]))][:limit]
        slots, chances, queued = slots[picked], chances[picked], queued[picked]
        first, half = (
            now_s - ages_s[picked] + age_of(table, rows[picked], before[picked] - np.log1p(-chances * part))
            for part in (0.1, 0.5)
        )
        times = np.maximum(np.where(queued, due_s[slots], np.stack([first, half])), now_s)
        return self._named(slots, chances, times, queued)

    def _named(self, slots: Ints, chances: Floats, times: Floats, queued: Array) -> list[Guess]:
        sessions, found = self.sessions, []
        columns = (slots, chances, times[0], times[1], queued)
        for slot, each, first_s, due_s, is_queued in zip(*(column.tolist() for column in columns), strict=True):
            features, key, turn = self.features[slot], sessions.last[slot], sessions.turn[slot]
            assert features is not None and key is not None
            if features.next_step == NextStep.CLOSED and not is_queued:
                continue
            sure = 1.0 if is_queued else turn / (turn + 2.0)
            found.append(Guess(sessions.tenant[slot], key, sessions.length[slot], each, first_s, due_s, sure))
        return found

    # Over a restart

    def export_state(self) -> Iterator[Piece]:
        yield "numbers", np.array(self.learning.numbers(), np.float64)
        yield from exported(self.sessions, self.features, self.learning.tables)

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        self.sessions, self.features, self.learning = restored(state, self.sessions.slots, later_s)
        self._running.clear()


FORMAT = 3
_COPIED = 128  # chains or marks copied between two pauses
_LOOKED_AT = 4096  # slots looked at between two pauses
_COLUMNS = ("tenant", "tokens", "answer", "length", "turn", "bin", "used_s", "pace", "due_s", "fan")
CHAIN = np.dtype(
    [
        ("last", "V16"), ("above", "V16"), ("has_above", "?"), ("features", "i1", (len(Features._fields),)),
        ("tenant", "i8"), ("tokens", "i8"), ("answer", "i8"), ("length", "i4"), ("turn", "i4"), ("bin", "i4"),
        ("used_s", "f8"), ("pace", "f8"), ("due_s", "f8"), ("fan", "u1"),
    ]
)  # fmt: skip
MARK = np.dtype([("tenant", "i8"), ("key", "V16"), ("is_shared", "?")])
_NO_KEY = bytes(16)


def exported(sessions: AwaitedReturns, features: Sequence[Features | None], tables: HazardTables) -> Iterator[Piece]:
    """Yield the learned state of a `SessionReturn`, as pairs of a table's name and a part of that table. Sessions come
    in the order of their last use. Requests whose answer has not ended are left out.
    """
    about = json.dumps({"format": FORMAT, "orders": tables.orders}).encode()
    yield "about", np.frombuffer(about, np.uint8)
    hand, live = sessions.hand, np.frombuffer(sessions.live, np.uint8)
    for first in range(0, sessions.slots, _LOOKED_AT):
        yield "chains", np.empty(0, CHAIN)
        slots = np.arange(hand + first, hand + min(first + _LOOKED_AT, sessions.slots)) % sessions.slots
        awaited = slots[live[slots] == 1].tolist()
        for begin in range(0, len(awaited), _COPIED):
            part = [slot for slot in awaited[begin : begin + _COPIED] if sessions.live[slot]]
            yield "chains", _chains(sessions, features, part)
    for marks in parts(sessions.marks(), MARK, _COPIED):
        yield "marks", marks
    yield from tables.copied()


def _chains(sessions: AwaitedReturns, features: Sequence[Features | None], slots: Sequence[int]) -> Array:
    chains = np.zeros(len(slots), CHAIN)
    above = [sessions.above[slot] for slot in slots]
    chains["last"] = np.frombuffer(b"".join(sessions.last[slot] or _NO_KEY for slot in slots), "V16")
    chains["above"] = np.frombuffer(b"".join(key or _NO_KEY for key in above), "V16")
    chains["has_above"] = [key is not None for key in above]
    chains["features"] = [features[slot] for slot in slots]
    for name in _COLUMNS:
        column = getattr(sessions, name)
        chains[name] = [column[slot] for slot in slots]
    return chains


def restored(state: State, slots: int, later_s: float) -> tuple[AwaitedReturns, list[Features | None], Learner]:
    """Return the sessions, the features of each and the learner from `state`, which `exported` yielded, with room for
    `slots` sessions. `later_s` is the number of seconds by which the clock of the new objects is ahead of the
    exporter's. Raises ValueError for a state that this version cannot use.
    """
    try:
        about, steps = json.loads(state["about"].tobytes()), state.get("steps", np.empty(0, STEP))
        chains = state.get("chains", np.empty(0, CHAIN))[-slots:]
        marks = state.get("marks", np.empty(0, MARK))
        if about["format"] != FORMAT or (steps.dtype, chains.dtype, marks.dtype) != (STEP, CHAIN, MARK):
            raise ValueError("the state of another version")
        sessions = AwaitedReturns(slots)
        learning = Learner(sessions, ladders_of(about["orders"], steps), ranked=False)
        learning.restore(state["numbers"].tolist())
        tables, cells = learning.tables, [Features(*each) for each in state["cells"].tolist()[KINDS:]]
        tables.restore(state, np.array([*range(KINDS), *map(tables.cell, cells)], np.int64))
        known = [Features(*each) for each in chains["features"].tolist()]
        _restore_chains(sessions, chains, known, tables, later_s)
        sessions.restore_marks(marks.tolist())
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"the state of another version: {error}") from error
    features: list[Features | None] = [*known, *[None] * (slots - len(known))]
    return sessions, features, learning


def _restore_chains(
    sessions: AwaitedReturns, chains: Array, features: Sequence[Features], tables: HazardTables, later_s: float
) -> None:
    for name in _COLUMNS:
        column = getattr(sessions, name)
        for slot, value in enumerate(chains[name].tolist()):
            column[slot] = value
    lasts, aboves = chains["last"].tolist(), chains["above"].tolist()
    for slot, (last, above, has_above) in enumerate(zip(lasts, aboves, chains["has_above"].tolist(), strict=True)):
        sessions.name(slot, sessions.tenant[slot], last, above if has_above else None, sessions.fan[slot])
        sessions.cell[slot] = tables.cell(features[slot])
        sessions.used_s[slot] += later_s
        sessions.due_s[slot] += later_s if sessions.due_s[slot] else 0.0
        sessions.bin[slot] = min(max(sessions.bin[slot], 0), BINS)
    sessions.hand = len(chains) % sessions.slots
