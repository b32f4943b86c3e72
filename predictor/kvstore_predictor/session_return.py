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
from kvstore_predictor.base import Array, Guess, Hint, NextStep, Piece, Predictor, Request
from kvstore_predictor.features import Features, begun, continued, unhinted, with_answer, with_hint
from kvstore_predictor.gittins import BINS, Floats, Ints, passed, passed_by
from kvstore_predictor.hazards import Ladder
from kvstore_predictor.horizons import END_S, age_of, at_age, chance, cumulative
from kvstore_predictor.prior import shipped
from kvstore_predictor.return_hazards import ReturnHazards, hint_number
from kvstore_predictor.sessions import Sessions

_ORDER = ("kind", "new_blocks", "length", "turn", "answer")  # of the table that starts empty
_GAP_MIN_S = 0.5
_RUNNING_MAX = 4096
_BRANCH_MIN = 2  # blocks of others
_DECAY = 0.9995  # of the tables' counts, a request
_RENEW_MIN, _RENEW_MAX, _RENEW_SHARE = 50, 2000, 4  # requests; a quarter more than before
_AGED, _LOGGED, _EVERY = 2048, 128, 4  # slots of a slice; entries; one request in four does a slice
_LEAST = 0.002  # a guess of less is none
_LIVE_SHARE = 8  # slots that a sample looks at for each of its guesses
_LATE_S, _DUE_CHANCE = 30.0, 0.95  # of a request that an engine foresees


def starting_ladders() -> list[Ladder]:
    """The shipped tables and an empty one; what follows decides which are believed."""
    return [*(Ladder(prior.order, prior.counts) for prior in shipped()), Ladder(_ORDER)]


class SessionReturn(Predictor):
    """Remembers the last `requests_max` requests: one in 16 blocks, for 64 MB a million blocks."""

    name = "session-return"

    def __init__(self, requests_max: int = 1 << 16) -> None:
        self.sessions = Sessions(requests_max)
        self.tables = ReturnHazards(starting_ladders())
        self.features: list[Features | None] = [None] * self.sessions.slots
        self.requests, self.renewed, self.renew_at = 0, 0, _RENEW_MIN
        self._renewal: Iterator[None] | None = None  # that is under way
        self._now_s = 0.0
        self._running: dict[int, tuple[int, bytes]] = {}  # requests whose answer is awaited: slot and last key

    # Events

    def requested(self, request: Request, now_s: float) -> None:
        keys, tenant, tokens = request.keys, request.tenant, request.prompt_tokens or -1
        if not keys:
            return
        sessions, tables, blocks = self.sessions, self.tables, len(keys)
        prev, reach = sessions.find(tenant, keys)
        if prev >= 0:
            gap_s, turn, known = now_s - sessions.used_s[prev], sessions.turn[prev] + 1, sessions.tokens[prev]
            first, reached = sessions.bin[prev], passed(gap_s)
            reached = max(first, reached)
            tables.log.append((sessions.cell[prev], first, reached, reached < BINS, sessions.hint[prev]))
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
        sessions.cell[slot], sessions.hint[slot] = tables.cell(features), 0
        sessions.bin[slot], sessions.length[slot], sessions.turn[slot] = 0, blocks, turn
        sessions.used_s[slot], sessions.pace[slot] = now_s, pace
        sessions.tokens[slot], sessions.answer[slot], sessions.due_s[slot] = tokens, 0, 0.0
        if request.number >= 0:
            self._running[request.number] = (slot, keys[-1])
            if len(self._running) > _RUNNING_MAX:
                del self._running[next(iter(self._running))]
        self.requests += 1
        if self.requests % _EVERY == 0:
            self._keep_up(now_s)

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
        """The chain's class, for which its age is counted up to now."""
        sessions, features = self.sessions, self.features[slot]
        assert features is not None
        reached, now_bin = sessions.bin[slot], passed(now_s - sessions.used_s[slot])
        if reached < now_bin:
            self.tables.log.append((sessions.cell[slot], reached, now_bin, False, sessions.hint[slot]))
            sessions.bin[slot] = now_bin
        return features

    def _add_answer(self, slot: int, tokens: int) -> None:
        sessions = self.sessions
        if sessions.tokens[slot] >= 0:
            sessions.tokens[slot] += tokens - sessions.answer[slot]  # not a second answer
            sessions.answer[slot] = tokens

    def _change_class(self, slot: int, features: Features) -> None:
        self.features[slot] = features
        self.sessions.hint[slot] = said = hint_number(features)
        self.sessions.cell[slot] = self.tables.cell(unhinted(features) if said else features)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        self.sessions.forget(tenant, keys)

    # Learning: one slice a call

    def _keep_up(self, now_s: float) -> None:
        self._now_s = now_s
        if self._renewal is not None:
            if next(self._renewal, self) is self:
                self._renewal = None
                self.renew_at = self.renewed + min(max(_RENEW_MIN, self.requests // _RENEW_SHARE), _RENEW_MAX)
        elif self.requests >= self.renew_at:
            self._renewal = self._renewed()
        elif len(self.tables.log) >= _LOGGED:
            self.tables.fold()

    def _renewed(self) -> Iterator[None]:
        """Count the age bins that live chains have passed since the last time; then what was seen begins to count."""
        used, sessions = min(self.sessions.slots, self.requests), self.sessions
        for first in range(0, used, _AGED):
            live = first + np.flatnonzero(np.frombuffer(sessions.live, np.uint8)[first : min(first + _AGED, used)])
            reached = np.frombuffer(sessions.bin, np.int32)
            now_bins = passed_by(self._now_s - np.frombuffer(sessions.used_s)[live])
            is_behind = reached[live] < now_bins
            live, now_bins = live[is_behind], now_bins[is_behind]
            if len(live):
                columns = sessions.cell, sessions.bin, sessions.hint
                cells, former, hints = (np.asarray(column)[live].astype(np.int64) for column in columns)
                self.tables.count_many(cells, former, now_bins, hints)
                reached[live] = now_bins
            yield
        live = np.flatnonzero(np.frombuffer(sessions.live, np.uint8))
        self.tables.free_unused(np.frombuffer(sessions.cell, np.int32)[live].astype(np.int64))
        self.tables.fold()
        yield
        since, self.renewed = self.renewed, self.requests
        yield from self.tables.renewal(_DECAY ** (self.requests - since))

    # Answers

    def guesses(self, now_s: float, horizon_s: float, limit: int) -> list[Guess]:
        return self._guesses(now_s, horizon_s, limit, 0, 1)

    def sample(self, now_s: float, horizon_s: float, count: int, turn: int) -> list[Guess]:
        step = max(1, min(self.sessions.slots, self.requests) // (_LIVE_SHARE * count))
        return self._guesses(now_s, horizon_s, count, turn % step, step)

    def _guesses(self, now_s: float, horizon_s: float, limit: int, begin: int, step: int) -> list[Guess]:
        """Of the slots `begin`, `begin + step`, and so on."""
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
        hints = np.frombuffer(sessions.hint, np.uint8)[slots]
        classes, rows = np.unique(np.frombuffer(sessions.cell, np.int32)[slots] * 256 + hints, return_inverse=True)
        cells, said = np.divmod(classes.astype(np.int64), 256)
        table = cumulative(self.tables.hazards(cells, said))
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
        yield "numbers", np.array([self.requests, self.renewed, self.renew_at], np.float64)
        yield from return_state.exported(self.sessions, self.features, self.tables)

    def import_state(self, state: dict[str, Array], later_s: float) -> None:
        found = return_state.restored(state, self.sessions.slots, later_s)
        requests, renewed, renew_at = return_state.numbers(state, 3)
        self.sessions, self.features, self.tables = found
        self.requests, self.renewed, self.renew_at = int(requests), int(renewed), int(renew_at)
        self._renewal = None
        self._running.clear()
