"""Shortest remaining time first, with ageing.

Schrage (1968) proved the rule best for the mean latency of one server; output lengths are predicted here, not known.
Each second of waiting counts as `ageing` seconds less work, so that a long request eventually passes short ones: one of
r seconds is ahead of all that arrive r / ageing seconds after it.
"""

from kvstore_engine.policies.policy import Candidate, Rank

_AHEAD = 0.25


class ShortestRemaining:
    """A running sequence is displaced only by one that is ahead by more than a quarter of its remaining time, since
    displacing has a cost and predictions have errors.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing

    def turn(self, candidate: Candidate, now_s: float) -> Rank:
        return candidate.served, self._aged_s(candidate, now_s), candidate.order

    def yields(self, candidate: Candidate, now_s: float) -> Rank:
        return self._aged_s(candidate, now_s), candidate.order

    def level(self, candidate: Candidate, now_s: float) -> float:
        return candidate.priority

    def displaces(self, waiting: Candidate, running: Candidate, now_s: float) -> bool:
        gain_s = self._aged_s(running, now_s) - self._aged_s(waiting, now_s)
        return gain_s > _AHEAD * running.remaining_s and waiting.remaining_s < running.remaining_s

    def _aged_s(self, candidate: Candidate, now_s: float) -> float:
        return candidate.remaining_s - self._ageing * (now_s - candidate.arrived_s)
