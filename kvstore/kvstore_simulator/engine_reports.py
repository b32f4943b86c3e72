"""The engine's reports to the policy while a trace is replayed: the prompt of each request, the end of its answer, and
hints. Hints are made up, or were given by engines when the trace was recorded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from operator import attrgetter

from kvstore_simulator.hints import HintOptions, made_up
from kvstore_simulator.trace import Op, RecordedHint, Trace
from kvstored.store.blocks import ResidencyView
from kvstored.store.policies import ChainHint, EvictionPolicy, Listens, RequestContext, deliver_hint

FIRST_TOKEN_NS = 500_000_000  # a trace says when requests begin; when they end is taken from the length of the answer
ANSWER_TOKEN_NS = 20_000_000


class EngineReports:
    """A sender of the reports that an engine would make to `policy` while `trace` is replayed: prompts, ends of
    answers, and made-up `hints`. `tenant_of` maps a tenant of the trace to its number in `residency`, the block index.
    """

    def __init__(
        self,
        trace: Trace,
        hints: HintOptions,
        policy: Listens,
        residency: ResidencyView,
        tenant_of: Callable[[int], int],
    ) -> None:
        self._trace = trace
        self._policy = policy
        self._residency = residency
        self._tenant_of = tenant_of
        self._queue_s = hints.queue_s
        self._hints = made_up(trace, hints)
        self._running: list[tuple[int, int, int]] = []  # heap of (end, request, answer's tokens)
        self._queued = 0  # requests up to here have been seen in the queue
        columns = (trace.ops == Op.REQUEST, trace.input_tokens, trace.output_tokens, trace.kinds)
        self._prompts = list(zip(*(column.tolist() for column in columns), strict=True))

    def ended(self, now_ns: int) -> None:
        """Report to the policy the answers that have ended by the time `now_ns`."""
        running = self._running
        while running and running[0][0] <= now_ns:
            end_ns, number, tokens = heappop(running)
            self._policy.answered(number, tokens, end_ns, self._hints[number])

    def begins(self, at: int, now_ns: int) -> None:
        """Report to the policy the prompt of request number `at`, and the answers that have ended by the time
        `now_ns`.
        """
        policy = self._policy
        self.ended(now_ns)
        if self._queue_s:
            self._report_queue(at, now_ns)
        is_request, asked, tokens, kind = self._prompts[at]
        if not is_request:
            return
        if not tokens:  # a recording, say: its hints have the answers
            if asked:
                policy.expect(RequestContext(at, asked))
            return
        policy.expect(RequestContext(at, asked, self._trace.kind_names[kind], is_answered_later=True))
        heappush(self._running, (now_ns + FIRST_TOKEN_NS + tokens * ANSWER_TOKEN_NS, at, tokens))

    def _report_queue(self, at: int, now_ns: int) -> None:
        """Report the requests that will be looked up soon and whose chains are in the tier."""
        trace = self._trace
        due_ns = now_ns + round(self._queue_s * 1e9)
        self._queued = max(self._queued, at + 1)
        while self._queued < trace.requests:
            later = self._queued
            its_ns = int(trace.times_ns[later] - trace.times_ns[0])
            if its_ns > due_ns:
                break
            self._queued += 1
            blocks = trace.blocks[trace.starts[later] : trace.starts[later + 1]].tolist()
            tenant, keys = self._tenant_of(int(trace.tenants[later])), [trace.key(block) for block in blocks]
            rows = self._residency.find_keys(tenant, keys)
            if rows:
                deliver_hint((self._policy,), self._residency, tenant, keys[-1], rows, ChainHint(due_ns=its_ns), now_ns)


def hints_before(trace: Trace, request: int) -> Sequence[RecordedHint]:
    """Return the hints of `trace` that were recorded after the previous request and before request number `request`."""
    place = attrgetter("before")
    return trace.hints[bisect_left(trace.hints, request, key=place) : bisect_left(trace.hints, request + 1, key=place)]


def replay_hint(
    recorded: RecordedHint,
    trace: Trace,
    tenant: int,
    residency: ResidencyView,
    policies: Sequence[EvictionPolicy],
    now_ns: int,
) -> None:
    """Deliver the recorded hint to `policies`, as the daemon does. `tenant` is the tenant's number in `residency`."""
    due_ns = None if recorded.due_in_ns is None else now_ns + recorded.due_in_ns
    hint = ChainHint(recorded.will_continue, due_ns, recorded.next_step, recorded.answer_tokens)
    rows = residency.find_keys(tenant, map(trace.key, trace.chain(recorded.block)))
    deliver_hint(policies, residency, tenant, trace.key(recorded.block), rows, hint, now_ns)
