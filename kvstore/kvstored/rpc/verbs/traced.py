"""The verbs, movement and leases with spans: what began them, how long they took, and what came of them.

It changes no answer. It is used only if the configuration names a collector, so that it costs nothing otherwise. A
request's span is below the engine's where the engine said which that is; movement that a request waits for, and its
lease, are below the request's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.trace import TraceContext, from_wire
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.base import Completion, Outcome, Slot
from kvstored.clients.sessions import ClientSession
from kvstored.clock import Clock
from kvstored.rpc.verbs import Quick, Slow, Verbs
from kvstored.store.assembly import Store
from kvstored.store.leases import LeaseBook
from kvstored.store.operations.records import Offer
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.mover import LaneTransfer
from kvstored.telemetry import CURRENT
from kvstored.telemetry.spans import EndedSpan, Facts, Sampler

MAX_OPEN_LEASES = 65_536
Note = Callable[[EndedSpan], None]
SpanFacts = dict[str, Any]


def traced(verbs: Verbs, store: Store, sampler: Sampler, note: Note) -> Verbs:
    """Return `verbs` with spans, and let the mover and the leases of `store` have spans too. `note` takes each span
    when it has ended."""
    maker = SpanMaker(sampler, note, store.clock)
    store.mover.trace = maker.traced_transfer
    store.leases.book = TracedLeases(store.leases.book, maker)
    return TracedVerbs(verbs, maker)


class SpanMaker:
    """A maker of spans by the daemon's clock. `sampler` says which are kept; `note` takes these when they end."""

    def __init__(self, sampler: Sampler, note: Note, clock: Clock) -> None:
        self.child, self._note, self.now_ns = sampler.child, note, clock.monotonic_ns

    def end(
        self, name: str, context: TraceContext, parent: TraceContext | None, began_ns: int, facts: Facts, **more: str
    ) -> None:
        """Note that the span `name` has ended now."""
        above = 0 if parent is None else parent.span_id
        self._note(EndedSpan(name, context, above, began_ns, self.now_ns(), facts, **more))

    def traced_transfer(self, lane: str, priority: Priority, nbytes: int, transfer: LaneTransfer) -> LaneTransfer:
        """Return `transfer`, which has a span when it ends. It is below a request's span only if that waits for it."""
        parent = CURRENT.get() if priority is Priority.DEMAND else None
        context = self.child(parent)
        if not context.is_sampled:
            return transfer
        queued_ns = started_ns = self.now_ns()

        def start(done: Completion) -> None:
            nonlocal started_ns
            started_ns = self.now_ns()
            transfer.start(done)

        def done(outcome: Outcome) -> None:
            waited_us = (started_ns - queued_ns) // 1000
            facts: SpanFacts = {
                "lane": lane,
                "priority": priority.name.lower(),
                "blocks": transfer.blocks,
                "bytes": nbytes,
                "waited_us": waited_us,
            }
            error = "" if outcome.ok else outcome.message or outcome.kind.name.lower()
            self.end("kvstored.move", context, parent, queued_ns, facts, error=error)
            transfer.done(outcome)

        return LaneTransfer(start, done, transfer.blocks)


class TracedLeases:
    """A book of leases that has a span for each, from the grant to the release by its client or the client's end; at
    most `MAX_OPEN_LEASES` at once. It passes all on to `book`."""

    def __init__(self, book: LeaseBook | None, maker: SpanMaker) -> None:
        self._book, self._maker = book, maker
        self._open: dict[int, tuple[TraceContext, TraceContext, int, int]] = {}

    def record_lease(self, lease_id: int, session_id: int, slots: Sequence[Slot]) -> None:
        if self._book is not None:
            self._book.record_lease(lease_id, session_id, slots)
        parent = CURRENT.get()
        if parent is not None and parent.is_sampled and len(self._open) < MAX_OPEN_LEASES:
            self._open[lease_id] = self._maker.child(parent), parent, self._maker.now_ns(), len(slots)

    def end_lease(self, lease_id: int) -> None:
        if self._book is not None:
            self._book.end_lease(lease_id)
        found = self._open.pop(lease_id, None)
        if found is not None:
            context, parent, began_ns, blocks = found
            self._maker.end("kvstored.lease", context, parent, began_ns, {"lease_id": lease_id, "blocks": blocks})


class TracedVerbs(Verbs):
    """A wrapper around `verbs`, the handlers of clients' requests: each lookup, acquire and store has a span."""

    def __init__(self, verbs: Verbs, maker: SpanMaker) -> None:
        self._verbs, self._maker = verbs, maker
        ops = ("lookup", "acquire", "store")
        self.quick = verbs.quick | {op: self._quick(op, verbs.quick[op]) for op in ops if op in verbs.quick}
        self.slow = verbs.slow | {op: self._slow(op, verbs.slow[op]) for op in ops}
        self.store_inline = self._store_inline

    def undelivered(self, session: ClientSession, reply: pb.Response) -> None:
        self._verbs.undelivered(session, reply)

    def _quick(self, op: str, verb: Quick) -> Quick:
        def answer(session: ClientSession, request: pb.Request) -> pb.Response | None:
            parent = from_wire(request.trace) or CURRENT.get()
            context, began_ns = self._maker.child(parent), self._maker.now_ns()
            before = CURRENT.set(context)
            facts, error = self._facts_of(session, request), ""
            try:
                response = verb(session, request)
                if response is None:  # a task answers, which has the span
                    return None
                _answered(facts, response)
            except KVStoreError as failure:
                error = failure.message
                raise
            finally:
                CURRENT.reset(before)
                if error or facts.get("answers"):
                    self._end(op, context, parent, began_ns, facts, error)
            return response

        return answer

    def _slow(self, op: str, verb: Slow) -> Slow:
        def answers(session: ClientSession, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
            facts = self._facts_of(session, request)
            return self._spanned(op, facts, from_wire(request.trace), verb(session, request))

        return answers

    def _store_inline(
        self, session: ClientSession, offer: Offer, durability: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.Response, None]:
        facts = self._facts_about(session) | {"blocks_asked": len(offer.keys)}
        return self._spanned("store", facts, None, self._verbs.store_inline(session, offer, durability))

    async def _spanned(
        self, op: str, facts: SpanFacts, parent: TraceContext | None, answers: AsyncGenerator[pb.Response, None]
    ) -> AsyncGenerator[pb.Response, None]:
        parent = parent or CURRENT.get()
        context, began_ns, error = self._maker.child(parent), self._maker.now_ns(), ""
        CURRENT.set(context)  # of the request's own task
        try:
            async with aclosing(answers):
                async for response in answers:
                    _answered(facts, response)
                    yield response
        except KVStoreError as failure:
            error = failure.message
            raise
        except asyncio.CancelledError:
            error = "its client gave it up"
            raise
        finally:
            self._end(op, context, parent, began_ns, facts, error)

    def _end(
        self, op: str, context: TraceContext, parent: TraceContext | None, began_ns: int, facts: SpanFacts, error: str
    ) -> None:
        if context.is_sampled:
            self._maker.end(f"kvstored.{op}", context, parent, began_ns, facts, kind="server", error=error)

    def _facts_of(self, session: ClientSession, request: pb.Request) -> SpanFacts:
        op = request.WhichOneof("op")
        sets = request.lookup.sets if op == "lookup" else [request.acquire.set] if op == "acquire" else [request.store]
        return self._facts_about(session) | {"blocks_asked": sum(len(each.keys) for each in sets) // KEY_BYTES}

    def _facts_about(self, session: ClientSession) -> SpanFacts:
        return {
            "tenant": session.tenant.name, "client": session.client_name, "model": session.fingerprint.model_name,
            "answers": 0,
        }  # fmt: skip


def _answered(facts: SpanFacts, response: pb.Response) -> None:
    """Add what `response` says to `facts`."""
    facts["answers"] += 1
    kind = response.WhichOneof("result")
    reason = pb.MISS_REASON_UNSPECIFIED
    if kind == "lookup":
        facts["blocks_found"] = min((each.usable_blocks for each in response.lookup.sets), default=0)
        reason = next((each.miss_reason for each in response.lookup.sets if each.miss_reason), reason)
    elif kind == "acquire":
        reply = response.acquire
        for name, more in (
            ("blocks_found", reply.blocks), ("blocks_promoted", reply.promoted_blocks),
            ("bytes_promoted", reply.promoted_bytes),
        ):  # fmt: skip
            facts[name] = facts.get(name, 0) + more
        reason = reply.miss_reason
    elif kind == "store":
        facts["blocks_stored"] = max(
            facts.get("blocks_stored", 0), response.store.statuses.count(pb.STORE_STATUS_STORED)
        )
    if reason:
        facts["miss"] = pb.MissReason.Name(reason).removeprefix("MISS_REASON_").lower()
