"""The statistics that policies read of each sequence.

The module owns the prediction of its remaining time, the tenants' accounts, and the speed of steps. It decides nothing.
"""

from collections import Counter, OrderedDict

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.policies import SchedulingCandidate
from kvstore_engine.batching.sequence import Sequence
from kvstore_restore.learned import LearnedCosts

_SPEED_MEMORY = 0.95
_REFRESH_TOKENS, _REFRESH_ENDED = 16, 8
PROMPT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
_MOST_IDLE = 1024
_EDGES = np.concatenate(([0.0], 2.0 ** (np.arange(0, 41) / 2)))  # two buckets an octave, up to a million tokens
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2
_FADING = 0.99
_ENOUGH = 3.0
_UNKNOWN_TOKENS = 256.0
_MOST_KEYS = 4096
_Key = tuple[str, int] | str | None


class SchedulingStatistics:
    """The predictions and counts about an engine's sequences that scheduling policies use. `costs` predicts computing
    times; the lengths of ended answers predict the lengths of others. `prefill_tokens` is the most prompt tokens in a
    step.
    """

    def __init__(self, costs: LearnedCosts, prefill_tokens: int, *, predicts: bool) -> None:
        """Make the statistics. With `predicts` False the remaining times are not computed and are 0."""
        self._costs = costs
        self._prefill_tokens = prefill_tokens
        self._predicts = predicts
        self.lengths = LengthPredictor()
        self.tenants = VirtualTokens()
        self._step_s: float | None = None
        self._service_s: float | None = None
        self._ended = 0

    def of(self, sequence: Sequence) -> SchedulingCandidate:
        """Return the facts about `sequence` as a scheduling policy gets them."""
        return SchedulingCandidate(
            order=sequence.order,
            arrived_s=sequence.arrived_s,
            since_s=sequence.since_s,
            priority=sequence.request.priority,
            level=sequence.level,
            remaining_s=self.remaining_s(sequence) if self._predicts else 0.0,
            served=self.tenants.served(sequence.request.tenant),
        )

    def remaining_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds from now to the end of `sequence`, if it ran all the time."""
        # Read of every waiting sequence at every admission, while predictions change slowly.
        at = self._ended // _REFRESH_ENDED, sequence.generated // _REFRESH_TOKENS, sequence.computed
        if sequence.forecast_at != at:
            sequence.forecast_at = at
            rest = self.lengths.remaining(
                sequence.request.tenant,
                sequence.prompt_tokens,
                sequence.generated,
                sequence.request.settings.max_tokens,
            )
            sequence.forecast_tokens = sequence.generated + rest
            computed = sequence.computed if sequence.swapped is None else sequence.swapped.computed
            sequence.forecast_prefill_s = self._costs.prefill_s(computed, sequence.length, self._prefill_tokens)
        decode_s = max(1.0, sequence.forecast_tokens - sequence.generated) * self.step_s
        return decode_s if sequence.is_decoding else decode_s + sequence.forecast_prefill_s

    @property
    def step_s(self) -> float:
        """The average seconds of recent steps in which answers got their next tokens."""
        return self._costs.batch_s([(1, 0)]) if self._step_s is None else self._step_s

    def wait_s(self, waiting: int, places: int) -> float:
        """Return the predicted seconds until `waiting` sequences have begun to run, when `places` sequences can run at
        once. It is 0 until a first answer has ended.
        """
        return waiting * (self._service_s or 0.0) / places

    def stepped(self, seconds: float, decodes: int) -> None:
        """Learn that a step took `seconds` in which `decodes` sequences computed the next token of an answer."""
        if decodes:
            old = seconds if self._step_s is None else self._step_s
            self._step_s = _SPEED_MEMORY * old + (1 - _SPEED_MEMORY) * seconds

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """Learn from `sequence`, whose answer ended by itself or at its limit at the time `now_s` (seconds)."""
        self._ended += 1
        self.lengths.observe(sequence.request.tenant, sequence.prompt_tokens, sequence.generated)
        admitted_s = sequence.accounts.admitted_s
        if admitted_s is not None:
            old = now_s - admitted_s if self._service_s is None else self._service_s
            self._service_s = _SPEED_MEMORY * old + (1 - _SPEED_MEMORY) * (now_s - admitted_s)


class VirtualTokens:
    """Counts of the tokens that each tenant was served, so that tenants can take turns: the one with the lowest count
    is next. A prompt token counts 1, a generated one 2. A tenant that was idle starts at the lowest count of the active
    ones, so that it saves up no turns (Sheng et al., OSDI 2024).
    """

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._active: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """Note that a request of `tenant` has arrived."""
        if not self._active[tenant]:
            least = min((self._served[other] for other, count in self._active.items() if count), default=None)
            if least is None:
                least = max(self._served.values(), default=0.0)  # all were idle: no tenant has a claim on another
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._active[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Note that a request of `tenant` has ended."""
        self._active[tenant] -= 1
        if not self._active[tenant]:
            del self._active[tenant]
            if len(self._served) - len(self._active) > _MOST_IDLE:
                idle = min((name for name in self._served if name not in self._active), key=self._served.__getitem__)
                del self._served[idle]

    def charge(self, tenant: str, *, prompt_tokens: int = 0, output_tokens: int = 0) -> None:
        """Add `prompt_tokens` and `output_tokens`, which were computed, to the count of `tenant`."""
        if tenant in self._active:
            self._served[tenant] += PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def served(self, tenant: str) -> float:
        """Return the count of `tenant`, a number of tokens. Only the differences between the counts of tenants have a
        meaning.
        """
        return self._served.get(tenant, 0.0)


class LengthPredictor:
    """A predictor of the number of tokens of an answer, from answers that have ended. It uses the tenant's answers to
    prompts of similar length; if they are too few, all answers of the tenant, otherwise all answers. Older answers
    count less.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[_Key, npt.NDArray[np.float64]] = OrderedDict()

    def observe(self, tenant: str, prompt_tokens: int, generated: int) -> None:
        """Learn that an answer to a prompt of `prompt_tokens` tokens ended after `generated` tokens."""
        bucket = int(np.searchsorted(_EDGES, generated, side="right")) - 1
        for key in _keys(tenant, prompt_tokens):
            counts = self._seen.setdefault(key, np.zeros(len(_MIDDLES)))
            self._seen.move_to_end(key)
            counts *= _FADING
            counts[min(bucket, len(counts) - 1)] += 1.0
        while len(self._seen) > _MOST_KEYS:
            self._seen.popitem(last=False)

    def remaining(self, tenant: str, prompt_tokens: int, generated: int, limit: int) -> float:
        """Return the expected number of further tokens, at least 1, of an answer that has `generated` tokens and may
        have at most `limit`.
        """
        most = max(limit - generated, 1)
        for key in _keys(tenant, prompt_tokens):
            counts = self._seen.get(key)
            if counts is None:
                continue
            longer = counts * (generated < _EDGES[1:])
            weight = float(longer.sum())
            if weight >= _ENOUGH:
                rest = np.clip(_MIDDLES - generated, 1.0, most)
                return float(longer @ rest) / weight
        return float(min(most, max(_UNKNOWN_TOKENS, generated) / 2 + 1))


def _keys(tenant: str, prompt_tokens: int) -> tuple[_Key, ...]:
    return (tenant, prompt_tokens.bit_length()), tenant, None
