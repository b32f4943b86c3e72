"""Which sessions will go on, and when: hazard tables over the sessions' last chains.

Each live chain has a class (turn, length, gap, pace, what the engine reports), each class a chance of return by age. A
guess is what is left of that at the chain's age, within the horizon. Starts from the shipped priors, learns on site.

Owns sessions, tables and when what was seen begins to count. Never knows tiers. After END_S without a request a session
is not guessed any more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import numpy as np

from kvstore_predictor import return_state
from kvstore_predictor.ages import count_age, count_ages, count_return
from kvstore_predictor.base import Array, Guess, Hint, NextStep, Piece, Predictor, Request
from kvstore_predictor.features import Features, features_of, with_answer, with_hint
from kvstore_predictor.gittins import BINS, Floats, Ints, passed_by
from kvstore_predictor.hazards import HazardTables, Ladder
from kvstore_predictor.horizons import END_S, age_of, at_age, chance, cumulative
from kvstore_predictor.prior import shipped
from kvstore_predictor.sessions import Sessions

_ORDER = ("kind", "new_blocks", "length", "turn", "answer")  # of the table that starts empty
_GAP_MIN_S = 0.5
_RUNNING_MAX = 4096
_BRANCH_MIN = 2  # blocks of others
_DECAY = 0.9995  # of the tables' counts, a request
_RENEW_MIN, _RENEW_MAX, _RENEW_SHARE = 25, 1000, 5  # requests; a fifth more than before
_AGED, _FOLDED, _MADE, _EVERY = 4096, 48, 32, 4  # slots, cells, cells; one request in four works
_IDLE, _AGEING, _FOLDING, _MAKING = range(4)
_LEAST = 0.002  # a guess of less is none
_LATE_S, _DUE_CHANCE = 30.0, 0.95  # of a request that an engine foresees


def starting_ladders() -> list[Ladder]:
    """The shipped tables and an empty one; what follows decides which are believed."""
    return [*(Ladder(prior.order, prior.counts) for prior in shipped()), Ladder(_ORDER)]


class SessionReturn(Predictor):
    """Remembers the last `requests_max` requests: one in 16 blocks, for 64 MB a million blocks."""

    name = "session-return"

    def __init__(self, requests_max: int = 1 << 16) -> None:
        self.sessions = Sessions(requests_max)
        self.tables = HazardTables(starting_ladders())
        self.features: list[Features | None] = [None] * self.sessions.slots
        self.requests, self.renewed, self.renew_at = 0, 0, _RENEW_MIN
        self._phase = _IDLE
        self._aged = 0  # slots below it have been
        self._running: dict[int, tuple[int, bytes]] = {}  # requests whose answer is awaited: slot and last key

    # Events

    def requested(self, request: Request, now_s: float) -> None:
        keys, tenant, tokens = request.keys, request.tenant, request.prompt_tokens or -1
        if not keys:
            return
        sessions = self.sessions
        prev, reach = sessions.find(tenant, keys)
        turn, gap_s, pace, text, fan = 1, 0.0, 0.0, request.prompt_tokens or None, 0
        if prev >= 0:
            turn, gap_s, pace = self._returned(prev, now_s)
            known = sessions.tokens[prev]
            text = max(0, tokens - known) if tokens >= 0 and known >= 0 else None
            fan = sessions.fan_of(prev, keys)
            sessions.drop(prev)
        else:
            reach = sessions.known(tenant, keys)
        features = features_of(
            is_continued=prev >= 0, is_branch=reach >= _BRANCH_MIN, new_blocks=len(keys) - reach, length=len(keys),
            turn=turn, gap_s=gap_s, pace_s=math.exp(pace), text_tokens=text, type_number=0,
        )  # fmt: skip
        slot = sessions.take(tenant, keys, fan)
        self.features[slot] = features
        sessions.cell[slot], sessions.bin[slot], sessions.length[slot] = self.tables.cell(features), 0, len(keys)
        sessions.turn[slot], sessions.used_s[slot], sessions.pace[slot] = turn, now_s, pace
        sessions.tokens[slot], sessions.answer[slot], sessions.due_s[slot] = tokens, 0, 0.0
        if request.number >= 0:
            self._running[request.number] = (slot, keys[-1])
            if len(self._running) > _RUNNING_MAX:
                del self._running[next(iter(self._running))]
        self.requests += 1
        if self.requests % _EVERY == 0 and (self._phase != _IDLE or self.requests >= self.renew_at):
            self._keep_up(now_s)

    def answered(self, number: int, output_tokens: int, now_s: float) -> None:
        slot, key = self._running.pop(number, (-1, b""))
        if slot >= 0 and self.sessions.last[slot] == key:
            self._ended(slot, Hint(answer_tokens=output_tokens), now_s)

    def hinted(self, tenant: int, key: bytes, hint: Hint, now_s: float) -> None:
        slot = self.sessions.by_end(tenant, key)
        if slot < 0:
            return
        if hint.next_step or hint.will_continue is not None or hint.answer_tokens:
            self._ended(slot, hint, now_s)
        if hint.due_s is not None:
            self.sessions.due_s[slot] = hint.due_s

    def _ended(self, slot: int, hint: Hint, now_s: float) -> None:
        """The chain is of another class from now on."""
        sessions, features = self.sessions, self.features[slot]
        assert features is not None
        if hint.answer_tokens:
            if sessions.tokens[slot] >= 0:
                sessions.tokens[slot] += hint.answer_tokens - sessions.answer[slot]  # not a second answer
                sessions.answer[slot] = hint.answer_tokens
            features = with_answer(features, hint.answer_tokens)
        age_s = now_s - sessions.used_s[slot]
        sessions.bin[slot] = count_age(self.tables, sessions.cell[slot], sessions.bin[slot], age_s)
        self.features[slot] = features = with_hint(features, hint)
        sessions.cell[slot] = self.tables.cell(features)

    def _returned(self, prev: int, now_s: float) -> tuple[int, float, float]:
        """A request continues `prev`: its turn, the gap before it, and the session's pace (a logarithm)."""
        sessions = self.sessions
        turn, gap_s = sessions.turn[prev] + 1, now_s - sessions.used_s[prev]
        count_return(self.tables, sessions.cell[prev], sessions.bin[prev], gap_s)
        pace = math.log(max(gap_s, _GAP_MIN_S))
        return turn, gap_s, pace if turn == 2 else 0.5 * (pace + sessions.pace[prev])

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        self.sessions.forget(tenant, keys)

    # Learning: one slice a call

    def _keep_up(self, now_s: float) -> None:
        tables = self.tables
        if self._phase == _IDLE:
            self._phase, self._aged = _AGEING, 0
        if self._phase == _AGEING:
            used = min(self.sessions.slots, self.requests)
            last = min(self._aged + _AGED, used)
            self._age(self._aged, last, now_s)
            self._aged = last
            if last == used:
                self._phase = _FOLDING
        elif self._phase == _FOLDING:
            if tables.fold(_FOLDED) < _FOLDED:  # more is seen all the time
                tables.renew(_DECAY ** (self.requests - self.renewed))
                self.renewed, self._phase = self.requests, _MAKING
        elif not tables.make(_MADE):
            self._phase = _IDLE
            self.renew_at = self.renewed + min(max(_RENEW_MIN, self.requests // _RENEW_SHARE), _RENEW_MAX)

    def _age(self, first: int, last: int, now_s: float) -> None:
        """Count the age bins that live chains have passed since the last time."""
        sessions = self.sessions
        live = first + np.flatnonzero(np.frombuffer(sessions.live, np.uint8)[first:last])
        reached, cells = np.frombuffer(sessions.bin, np.int32), np.frombuffer(sessions.cell, np.int32)
        now_bins = passed_by(now_s - np.frombuffer(sessions.used_s)[live])
        self.tables.in_use(cells[live])
        self.tables.want(cells[live[now_bins < BINS]])
        count_ages(self.tables, cells, reached, live, now_bins)

    # Answers

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        sessions = self.sessions
        used_s, due_s = np.frombuffer(sessions.used_s), np.frombuffer(sessions.due_s)
        is_live = np.frombuffer(sessions.live, np.bool_)
        is_due = (due_s > now_s - _LATE_S) & (due_s > 0.0)
        slots: Ints = np.flatnonzero(is_live & ((used_s > now_s - END_S) | is_due))
        if not len(slots) or limit < 1:
            return []
        cells, rows = np.unique(np.frombuffer(sessions.cell, np.int32)[slots], return_inverse=True)
        table = cumulative(self.tables.hazards(cells.astype(np.int64)))
        ages_s = np.maximum(now_s - used_s[slots], 0.0)
        before = at_age(table, rows, ages_s)
        chances = chance(before, at_age(table, rows, ages_s + horizon_s))
        queued = is_due[slots] & (due_s[slots] <= now_s + horizon_s)
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
        yield "numbers", np.array([self.requests, self.renewed, self.renew_at], np.float64)
        yield from return_state.exported(self.sessions, self.features, self.tables)

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        found = return_state.restored(state, self.sessions.slots, later_s)
        requests, renewed, renew_at = return_state.numbers(state, 3)
        self.sessions, self.features, self.tables = found
        self.requests, self.renewed, self.renew_at = int(requests), int(renewed), int(renew_at)
        self._phase = _IDLE
        self._running.clear()
