"""Measures what each kind of knowledge of the future would add to the policy that ships. Never in a daemon.

`informed` makes the production policy with one more feature, the class of a request by what is foreseen of it: whether
the session goes on, in about how long, or both. Its hazard tables learn what the class is worth, as any other's. A
request that does not go on gets, where only the time is known, a time drawn from the requests that do. The policy knows
the answer's length when a request arrives instead of when it ends. Where it knows the exact time of the next turn, it
ranks chains by that time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvstore_predictor.ladders import Ladder
from kvstore_simulator.policies import POLICIES
from kvstore_simulator.policies.clairvoyant import next_uses
from kvstore_simulator.trace import Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import ChainHint, PolicySettings, RequestContext
from kvstored.store.policies.chain_hazard import ChainHazard
from kvstored.store.policies.chains.follower import UNTRAINED_ORDERS, LearningSettings, starting_tables

# Named after what the policy knows: whether, when (in classes), the exact time, the answer.
UNPRIMED = "no shipped tables"  # not an oracle: what is learnt on site alone
ANSWER = f"answer, {UNPRIMED}"  # the shipped ones are of answers that are known once they have ended
WHETHER, WHEN, BOTH, EXACT, ALL = "whether", "when", "whether+when", "time", "time+answer"
KNOWLEDGE = {
    ANSWER: "the answer's length, at arrival",
    WHETHER: "whether the session goes on",
    WHEN: "when, if it goes on",
    BOTH: "whether, and about when",
    EXACT: "whether, and the very time",
    ALL: "the very time, and the answer's length",
}
_GAPS_S = (8.0, 20.0, 50.0, 120.0, 300.0, 800.0)  # the policy distinguishes eight types of request: by these, and never
_INFORMED, _UNPRIMED = "chain-hazard-informed", "chain-hazard-unprimed"
_INFORMED_UNPRIMED = "chain-hazard-informed-unprimed"
_ENDS, _GOES_ON = "ends", "goes on"
_ORDERS = (("type", "kind", "new_blocks", "length", "answer"), ("type", "kind", "gap", "new_blocks", "answer"))


@dataclass(frozen=True, slots=True)
class Foresight:
    """The future by request: seconds until the session goes on (the last block but one is used again), or -1; the
    answer.
    """

    seconds: Sequence[float]
    drawn: Sequence[float]  # the same, with a made-up time where it does not go on
    answers: Sequence[int]


def foresee(trace: Trace, seed: int = 0) -> Foresight:
    uses, lengths = next_uses(trace), np.diff(trace.starts)
    end = np.maximum(trace.starts[1:] - np.where(lengths > 1, 2, 1), 0)
    following = np.where(lengths > 0, uses[np.minimum(end, len(uses) - 1)], trace.requests)
    goes_on = following < trace.requests
    later_ns = trace.times_ns[np.minimum(following, trace.requests - 1)]
    seconds = np.where(goes_on, (later_ns - trace.times_ns) / 1e9, -1.0)
    known = seconds[goes_on] if goes_on.any() else np.zeros(1)
    drawn = np.where(goes_on, seconds, np.random.default_rng(seed).choice(known, trace.requests))
    return Foresight(seconds.tolist(), drawn.tolist(), trace.output_tokens.tolist())


class WithForesight(ChainHazard):
    """A policy that receives foresight as it receives an engine's reports: by `expect`, `answered` and `on_hint`."""

    _foresight: Foresight
    _knowledge: str = ""
    _number = -1

    def know(self, foresight: Foresight, knowledge: str) -> None:
        self._foresight, self._knowledge = foresight, knowledge

    def expect(self, context: RequestContext) -> None:
        self._number = context.number
        super().expect(context._replace(kind=self._class_of(context.number) or context.kind))

    def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        super().requested(rows, missing, tenant, now_ns)
        number, self._number = self._number, -1
        if number < 0:
            return
        if self._knowledge in (ANSWER, ALL):
            self.answered(number, self._foresight.answers[number], now_ns)
        if rows and self._knowledge in (EXACT, ALL) and self._foresight.seconds[number] >= 0:
            due = ChainHint(due_ns=now_ns + round(self._foresight.seconds[number] * 1e9))
            self.on_hint(tenant, rows[-1], self.residency.key(rows[-1]), due, now_ns)

    def _class_of(self, number: int) -> str:
        seconds = self._foresight.seconds[number]
        if self._knowledge == WHEN:
            return f"within class {bisect_right(_GAPS_S, self._foresight.drawn[number])}"
        if self._knowledge == WHETHER:
            return _ENDS if seconds < 0 else _GOES_ON
        if self._knowledge in (BOTH, EXACT, ALL):
            return _ENDS if seconds < 0 else f"within class {bisect_right(_GAPS_S, seconds)}"
        return ""


def _by_class() -> list[Ladder]:
    return [Ladder(order) for order in _ORDERS] + starting_tables()


def _empty() -> list[Ladder]:
    return [Ladder(order) for order in UNTRAINED_ORDERS]


def informed(
    residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = _INFORMED
) -> WithForesight:
    """Return the policy with tables by class as well."""
    return WithForesight(residency, tier, settings, name, learning=LearningSettings(_by_class))


def unprimed(
    residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = _UNPRIMED
) -> ChainHazard:
    """Return the policy with empty tables: nothing of the trace has been seen before."""
    return ChainHazard(residency, tier, settings, name, learning=LearningSettings(_empty))


def informed_unprimed(
    residency: ResidencyView, tier: int, settings: PolicySettings | None = None, name: str = _INFORMED_UNPRIMED
) -> WithForesight:
    """Return the policy with foresight, and with empty tables."""
    return WithForesight(residency, tier, settings, name, learning=LearningSettings(_empty))


def policy_for(knowledge: str) -> str:
    """The name of the policy that takes it, known in this process from now on."""
    for name, make in ((_INFORMED, informed), (_UNPRIMED, unprimed), (_INFORMED_UNPRIMED, informed_unprimed)):
        POLICIES[name] = f"{make.__module__}:{make.__name__}"
    if knowledge == UNPRIMED:
        return _UNPRIMED
    return _INFORMED_UNPRIMED if knowledge == ANSWER else _INFORMED
