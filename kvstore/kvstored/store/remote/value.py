"""What a question to key-addressed tiers is worth: the compute that it is expected to save, less what it takes.

Owns what each tenant's questions have found, and how long answers take. A question that does not pay is asked all the
same now and then, with no request waiting for it, so that a store which begins to pay is noticed: each n-th time, n
twice as large after each of these that found nothing. Pure: no clock, no I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum

from kvstored.store.remote.compute import ComputeTimes

DEADLINE_MS = 50  # of a question; a client that computes instead has to know soon
LEAST_DEADLINE_MS = 10
SAVED_US_PER_TOKEN = 500.0  # of prefill, until it was seen: engines on CPUs take more, on GPUs less
FIRST_EVERY, LAST_EVERY = 8, 512
_DECAY = 0.8  # a question
_PRIOR_ASKED, _PRIOR_FOUND = 16.0, 8.0  # blocks, before anything is known
_REMEMBERED, _FEW = 64, 8  # answers
_QUANTILE, _SLACK = 0.9, 2.0  # the deadline is so many times what so many answers took at most
_PRIOR_S = 0.001
_WEIGHT, _QUICK_WEIGHT = 1 / 8, 1 / 2  # of an answer that took longer than expected, and of one that did not: a store
# that was away is as quick as before when it is back


class Verdict(Enum):
    WAIT = "wait"  # ask, and wait for the answer within the deadline
    ASIDE = "aside"  # ask, and let no request wait
    NO = "no"


class AnswerTimes:
    """How long a tier takes to answer, late answers included."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self.expected_s = _PRIOR_S
        self.deadline_s = DEADLINE_MS / 1000

    def add(self, seconds: float) -> None:
        if not self._recent:
            self.expected_s = seconds
        else:
            self.expected_s += (_WEIGHT if seconds > self.expected_s else _QUICK_WEIGHT) * (seconds - self.expected_s)
        self._recent.append(seconds)
        if len(self._recent) >= _FEW:
            ordered = sorted(self._recent)
            wanted_s = _SLACK * ordered[int(_QUANTILE * (len(ordered) - 1))]
            self.deadline_s = min(DEADLINE_MS, max(LEAST_DEADLINE_MS, wanted_s * 1000)) / 1000


@dataclass(slots=True)
class _Tenant:
    asked: float = _PRIOR_ASKED  # blocks, decayed
    found: float = _PRIOR_FOUND
    block_bytes: float = 0.0  # of those found
    declined: int = 0  # since the last question
    every: int = FIRST_EVERY
    hopeless: int = 0  # missing tokens for which asking did not pay by the present estimates; fewer do not either


class RemoteValue:
    """`saved_us_per_token`: what computing a token takes, where `compute` has not seen it."""

    def __init__(self, saved_us_per_token: float = SAVED_US_PER_TOKEN, compute: ComputeTimes | None = None) -> None:
        self._compute = compute or ComputeTimes()
        self._saved_us_per_token = saved_us_per_token
        self._tenants: dict[int, _Tenant] = {}

    def block_bytes(self, tenant: int) -> int:
        """What a block of the tenant is expected to be; 0: nothing was found yet."""
        known = self._tenants.get(tenant)
        return round(known.block_bytes) if known is not None else 0

    def declines(self, tenant: int, tokens: int) -> bool:
        """Whether `judge` would say no for so many missing tokens, as it did for as many or more before; counts as
        asking it. A tenth of its time."""
        known = self._tenants.get(tenant)
        if known is None or tokens > known.hopeless or known.declined + 1 >= known.every:
            return False
        known.declined += 1
        return True

    def expected_blocks(self, tenant: int, blocks: int) -> float:
        """How many of so many missing blocks a question is expected to find."""
        known = self._tenants.get(tenant)
        return blocks * (known.found / known.asked if known is not None else _PRIOR_FOUND / _PRIOR_ASKED)

    def judge(self, tenant: int, blocks: int, block_tokens: int, load_us: float, times: AnswerTimes) -> Verdict:
        """Whether to ask for `blocks` missing blocks; `load_us`: what loading those takes that are expected."""
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        block_us = self._compute.block_us(tenant) or block_tokens * self._saved_us_per_token
        computed_us = self.expected_blocks(tenant, blocks) * block_us
        if computed_us - load_us > times.expected_s * 1e6:
            return Verdict.WAIT if times.expected_s <= DEADLINE_MS / 1000 else Verdict.ASIDE
        known.hopeless = blocks * block_tokens
        known.declined += 1
        if known.declined < known.every:
            return Verdict.NO
        known.declined = 0
        return Verdict.ASIDE

    def answered(self, tenant: int, asked: int, found: int, nbytes: int) -> None:
        """A question for `asked` blocks found so many, of so many bytes in all."""
        known = self._tenants.setdefault(tenant, _Tenant())
        known.hopeless = 0
        known.asked = known.asked * _DECAY + asked
        known.found = known.found * _DECAY + found
        if found:
            known.every = FIRST_EVERY
            mean = nbytes / found
            known.block_bytes += (mean - known.block_bytes) * (_WEIGHT if known.block_bytes else 1.0)
        else:
            known.every = min(LAST_EVERY, 2 * known.every)
