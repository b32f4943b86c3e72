"""What policies read of each sequence.

Owns the prediction of its remaining time, the tenants' accounts, and the speed of steps. It decides nothing.
"""

from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.policies import Candidate, LengthPredictor, VirtualTokens
from kvstore_restore.learned import LearnedCosts

_SPEED_MEMORY = 0.95
_REFRESH_TOKENS, _REFRESH_ENDED = 16, 8


class SchedulingStatistics:
    """The statistics of one engine. `costs` predicts computing times; ended answers predict lengths."""

    def __init__(self, costs: LearnedCosts, prefill_tokens: int, *, predicts: bool) -> None:
        """`predicts`: the policy reads remaining times."""
        self._costs = costs
        self._prefill_tokens = prefill_tokens
        self._predicts = predicts
        self.lengths = LengthPredictor()
        self.tenants = VirtualTokens()
        self._step_s: float | None = None
        self._service_s: float | None = None
        self._ended = 0

    def of(self, sequence: Sequence) -> Candidate:
        """What a policy sees of `sequence` now."""
        return Candidate(
            order=sequence.order,
            arrived_s=sequence.arrived_s,
            since_s=sequence.since_s,
            priority=sequence.request.priority,
            level=sequence.level,
            remaining_s=self.remaining_s(sequence) if self._predicts else 0.0,
            served=self.tenants.served(sequence.request.tenant),
        )

    def remaining_s(self, sequence: Sequence) -> float:
        """Seconds until `sequence` ends, once it runs."""
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
        """Seconds that recent steps with decodes took."""
        return self._costs.batch_s([(1, 0)]) if self._step_s is None else self._step_s

    def wait_s(self, waiting: int, places: int) -> float:
        """Seconds until `waiting` sequences are admitted, at the speed so far; 0 until an answer has ended."""
        return waiting * (self._service_s or 0.0) / places

    def stepped(self, seconds: float, decodes: int) -> None:
        """A step took `seconds`."""
        if decodes:
            old = seconds if self._step_s is None else self._step_s
            self._step_s = _SPEED_MEMORY * old + (1 - _SPEED_MEMORY) * seconds

    def ended(self, sequence: Sequence, now_s: float) -> None:
        """An answer ended by itself or at its limit."""
        self._ended += 1
        self.lengths.observe(sequence.request.tenant, sequence.prompt_tokens, sequence.generated)
        admitted_s = sequence.accounts.admitted_s
        if admitted_s is not None:
            old = now_s - admitted_s if self._service_s is None else self._service_s
            self._service_s = _SPEED_MEMORY * old + (1 - _SPEED_MEMORY) * (now_s - admitted_s)
