"""Knowledge of remote (key-addressed) tiers that other nodes share: whether asking them pays, and which blocks they
lack. Pure: times are arguments, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvstored.clock import NS_PER_S

DEADLINE_MS = 50  # of a question; a client that computes instead has to know soon
LEAST_DEADLINE_MS = 10
SAVED_US_PER_TOKEN = 500.0  # of prefill, until it was seen: engines on CPUs take more, on GPUs less
FIRST_EVERY, LAST_EVERY = 8, 512
_DECAY = 0.8  # a question
_PRIOR_ASKED, _PRIOR_FOUND = 16.0, 8.0  # blocks, before anything is known
_REMEMBERED, _FEW = 64, 8  # answers
_QUANTILE, _SLACK = 0.9, 2.0  # the deadline is so many times what so many answers took at most
_PRIOR_S = 0.001
FIRST_ABSENT_S, LAST_ABSENT_S = 1.0, 30.0  # how long an absence is believed
MOST_ABSENT, MOST_MISSES = 16384, 1024
LONGEST_US = 10_000_000  # a block: what takes longer was not computed at once
_WEIGHT_UP, _WEIGHT_DOWN = 1 / 8, 1 / 2  # of compute that took longer, or less time, than known
_WEIGHT, _QUICK_WEIGHT = 1 / 8, 1 / 2  # of an answer that took longer than expected, and of one that did not: a store
# that was away is as quick as before when it is back


class RemoteVerdict(Enum):
    """A decision whether the daemon asks a remote tier for blocks."""

    WAIT = "wait"  # ask, and wait for the answer within the deadline
    ASIDE = "aside"  # ask, and let no request wait
    NO = "no"


class ComputeTimes:
    """An estimate, for each tenant, of the time that engines take to compute a block: from a get that missed it to its
    put.

    A bounded number of misses wait for their puts. A put may come later than the computation ended, so the estimate
    follows shorter times faster than longer ones."""

    def __init__(self) -> None:
        self._missed: OrderedDict[tuple[int, bytes], int] = OrderedDict()  # since when, oldest first
        self._block_us: dict[int, float] = {}

    def missed(self, tenant: int, key: bytes, now_ns: int) -> None:
        """Note that a get of `tenant` found the blocks before `key` in its chain, but not `key`."""
        self._missed[tenant, key] = now_ns
        self._missed.move_to_end((tenant, key))
        if len(self._missed) > MOST_MISSES:
            self._missed.popitem(last=False)

    def put(self, tenant: int, key: bytes, blocks: int, now_ns: int) -> bool:
        """Note a put of `blocks` consecutive blocks, the first of them `key`. Return whether a get had missed `key`
        before.
        """
        since_ns = self._missed.pop((tenant, key), None)
        if since_ns is None:
            return False
        seen_us = (now_ns - since_ns) / 1000 / blocks
        if seen_us <= LONGEST_US:
            known_us = self._block_us.setdefault(tenant, seen_us)
            self._block_us[tenant] += (_WEIGHT_UP if seen_us > known_us else _WEIGHT_DOWN) * (seen_us - known_us)
        return True

    def block_us(self, tenant: int) -> float | None:
        """Return the microseconds that computing a block takes engines of `tenant`, or None when none was seen yet."""
        return self._block_us.get(tenant)


class Absences:
    """A record of blocks that remote tiers said they do not have, believed for a short time.

    An answer is believed for `FIRST_ABSENT_S` seconds at first, twice as long each time the same answer comes again, up
    to `LAST_ABSENT_S`. It is never used for another tenant, and is forgotten when this node has written the block
    since, or when the block was deleted by order. At most `most` answers are kept; the oldest are dropped first."""

    def __init__(self, most: int = MOST_ABSENT) -> None:
        self._most = most
        self._known: OrderedDict[tuple[int, bytes], tuple[int, float]] = OrderedDict()  # until when, and for how long

    def covers(self, tenant: int, key: bytes, now_ns: int) -> bool:
        """Return whether the remote tiers have said recently that they do not have the block `key`."""
        known = self._known.get((tenant, key))
        return known is not None and now_ns < known[0]

    def note(self, tenant: int, key: bytes, now_ns: int) -> None:
        """Note that the remote tiers have just said that they do not have the block `key`."""
        known = self._known.pop((tenant, key), None)
        lasts_s = FIRST_ABSENT_S if known is None else min(LAST_ABSENT_S, 2 * known[1])
        self._known[tenant, key] = (now_ns + round(lasts_s * NS_PER_S), lasts_s)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Drop the answers about the blocks `keys` of `tenant`, or all of its blocks (None): they have been written or
        deleted.
        """
        if keys is None:
            keys = [key for owner, key in self._known if owner == tenant]
        for key in keys:
            self._known.pop((tenant, key), None)


class AnswerTimes:
    """A record of how long a remote tier takes to answer questions, late answers included. `expected_s` is the expected
    time in seconds, `deadline_s` how long to wait for an answer."""

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
    """An estimate of whether asking remote tiers for blocks pays: the compute time that their blocks are expected to
    save, less the time that asking and loading take.

    A question that does not pay is still asked now and then, with no request waiting for it, so that the daemon notices
    a store which begins to pay: each n-th time, where n doubles after each such question that found nothing. Where
    `compute` has no estimate, computing a token takes `saved_us_per_token` microseconds."""

    def __init__(self, saved_us_per_token: float = SAVED_US_PER_TOKEN, compute: ComputeTimes | None = None) -> None:
        self._compute = compute or ComputeTimes()
        self._saved_us_per_token = saved_us_per_token
        self._tenants: dict[int, _Tenant] = {}

    def block_bytes(self, tenant: int) -> int:
        """Return the expected payload bytes of a block of `tenant` in a remote tier, 0 when none was found there
        yet."""
        known = self._tenants.get(tenant)
        return round(known.block_bytes) if known is not None else 0

    def declines(self, tenant: int, tokens: int) -> bool:
        """Return True when `judge` would certainly answer NO to a question of `tenant` for blocks of `tokens` missing
        tokens. A True counts as a call of `judge`; it takes a tenth of its time."""
        known = self._tenants.get(tenant)
        if known is None or tokens > known.hopeless or known.declined + 1 >= known.every:
            return False
        known.declined += 1
        return True

    def expected_blocks(self, tenant: int, blocks: int) -> float:
        """Return how many of `blocks` blocks of `tenant` that are missing here a remote store is expected to have."""
        known = self._tenants.get(tenant)
        return blocks * (known.found / known.asked if known is not None else _PRIOR_FOUND / _PRIOR_ASKED)

    def judge(self, tenant: int, blocks: int, block_tokens: int, load_us: float, times: AnswerTimes) -> RemoteVerdict:
        """Decide whether to ask for `blocks` missing blocks of `block_tokens` tokens each. `load_us` is the time for
        loading the blocks that are expected to be found; `times` are the tier's answer times.
        """
        known = self._tenants.get(tenant)
        if known is None:
            known = self._tenants[tenant] = _Tenant()
        block_us = self._compute.block_us(tenant) or block_tokens * self._saved_us_per_token
        computed_us = self.expected_blocks(tenant, blocks) * block_us
        if computed_us - load_us > times.expected_s * 1e6:
            return RemoteVerdict.WAIT if times.expected_s <= DEADLINE_MS / 1000 else RemoteVerdict.ASIDE
        known.hopeless = blocks * block_tokens
        known.declined += 1
        if known.declined < known.every:
            return RemoteVerdict.NO
        known.declined = 0
        return RemoteVerdict.ASIDE

    def answered(self, tenant: int, asked: int, found: int, nbytes: int) -> None:
        """Note that a question of `tenant` for `asked` blocks found `found` of them, `nbytes` bytes in all."""
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
