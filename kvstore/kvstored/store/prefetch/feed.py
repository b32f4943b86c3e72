"""The reports of the store's operations: each request once, engines' expectations, and deletions.

Policies get all of it, as it is reported. The predictor gets one event for a request, however many gets and puts belong
to it. The module moves no block.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore_predictor.base import Hint, NextStep, PredictorRequest
from kvstore_proto.identity import KEY_BYTES, NO_PARENT, split_keys
from kvstored.clock import NS_PER_S
from kvstored.store.blocks import Residency
from kvstored.store.policies import ChainHint, EvictionPolicy, Listens, RequestContext, deliver_hint
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.prefetcher import Prefetcher
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.store.remote import ComputeTimes

_STEPS = frozenset(step.value for step in NextStep)
_NOT_KNOWN = RequestContext(-1)
MISSING_MAX = 1024  # missing keys passed on to policies; they take up to a microsecond for each


class Feed:
    """A distributor of events to the policies and the predictor: it passes on each request once, hints, and deletions.
    `policies` has the policies of all tiers. `compute` (an estimate of compute times) is notified of misses and
    puts."""

    def __init__(
        self,
        residency: Residency,
        policies: Sequence[EvictionPolicy],
        predictor: GuardedPredictor,
        recent: RecentRequests,
        prefetcher: Prefetcher,
        compute: ComputeTimes,
    ) -> None:
        self._compute = compute
        self.policies = policies
        self._residency = residency
        self._predictor = predictor
        self._recent = recent
        self._prefetcher = prefetcher

    def got(
        self, tenant: int, session: int, packed: bytes, found: int, context: RequestContext | None, now_ns: int
    ) -> None:
        """Note that a get by `session` of the chain `packed` (16 bytes a key), whose first `found` blocks were stored,
        has been answered."""
        if missing := packed[found * KEY_BYTES : (found + 1) * KEY_BYTES]:
            self._compute.missed(tenant, missing, now_ns)
        if not self._predictor.works or not packed:
            return
        keys = split_keys(packed)
        if self._recent.got(tenant, session, keys, found, now_ns):
            row = self._residency.find(tenant, keys[1]) if found > 1 else -1
            if row >= 0 and self._residency.parent(row) < 0:
                self._recent.got_parts(tenant, keys)
            self._requested(tenant, keys, context or _NOT_KNOWN, now_ns)

    def put(self, tenant: int, keys: Sequence[bytes], parent: bytes, now_ns: int) -> None:
        """Note a put of the blocks `keys`, which continue the block `parent`. An engine whose lookup finds nothing
        sends no get, so the put of a whole chain counts as its request."""
        if not keys:
            return
        is_reported = self._compute.put(tenant, keys[0], len(keys), now_ns)
        if not is_reported and parent == NO_PARENT and self._residency.find(tenant, keys[0]) < 0:
            self._residency.request_run(tenant, [], keys[:MISSING_MAX], now_ns)
        if self._predictor.works and self._recent.put(tenant, keys, parent, now_ns):
            self._requested(tenant, [*self._above(tenant, parent), *keys], _NOT_KNOWN, now_ns)

    def answered(self, number: int, output_tokens: int, now_ns: int) -> None:
        """Note that the request `number` (of its RequestContext) has ended with `output_tokens` tokens."""
        for policy in self.policies:
            if isinstance(policy, Listens):
                policy.answered(number, output_tokens, now_ns)
        self._predictor.attempt(lambda it: it.answered(number, output_tokens, now_ns / NS_PER_S), None)

    def hinted(self, tenant: int, keys: Sequence[bytes], rows: Sequence[int], hint: ChainHint, now_ns: int) -> None:
        """Note an engine's expectation `hint` about the chain `keys`; `rows` are the rows of its leading blocks that
        are stored.
        """
        deliver_hint(self.policies, self._residency, tenant, keys[-1], rows, hint, now_ns)
        if not self._predictor.works:
            return
        key, due_s = self._recent.end_of(tenant, keys), None if hint.due_ns is None else hint.due_ns / NS_PER_S
        step = NextStep(hint.next_step) if hint.next_step in _STEPS else NextStep.UNSPECIFIED
        said = Hint(hint.will_continue, due_s, step, hint.answer_tokens)
        self._predictor.hinted(tenant, key, said, now_ns / NS_PER_S)
        self._prefetcher.wake()

    def forgotten(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Drop everything that names the blocks `keys` of `tenant` (None: all its blocks), since they were deleted."""
        self._predictor.attempt(lambda it: it.forget(tenant, keys), None)
        self._recent.forget(tenant, keys)
        self._prefetcher.forgotten(tenant, keys)

    def _requested(self, tenant: int, keys: Sequence[bytes], context: RequestContext, now_ns: int) -> None:
        request = PredictorRequest(tenant, keys, context.number, context.input_tokens, context.kind)
        self._predictor.requested(request, now_ns / NS_PER_S)
        self._predictor.beside(lambda: self._prefetcher.requested(tenant, keys, now_ns))

    def _above(self, tenant: int, key: bytes) -> list[bytes]:
        """Return the chain down to the block `key`, as far as it is stored."""
        residency, found = self._residency, []
        row = residency.find_any(tenant, key)
        while row >= 0:
            found.append(residency.key(row))
            row = residency.parent(row)
        return found[::-1]
