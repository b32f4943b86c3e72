"""A client's requests on the wire: lookup, put (lend or reserve, store), get (acquire, release), hints (prefetch,
touch, hint), delete and explain.

Each verb is a class that checks a request, has the store carry it out, and puts the answer into a message. `quick`
answers without waiting for bytes to move; None: the request must run as a task, through `slow`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.delete import DeleteVerb
from kvstored.rpc.verbs.get import AcquireVerb
from kvstored.rpc.verbs.hints import HintVerb
from kvstored.rpc.verbs.in_place_put import InPlacePut
from kvstored.rpc.verbs.lookup import LookupVerb
from kvstored.rpc.verbs.staged_put import StagedPut
from kvstored.store.assembly import Store
from kvstored.store.operations import Operations
from kvstored.store.operations.offer import Offer, Stored
from kvstored.telemetry import RecentMisses


class Verbs:
    """Dispatch by the name of the request's `op` field. `explain` answers an explain of the client's own blocks."""

    def __init__(
        self,
        store: Store,
        operations: Operations,
        misses: RecentMisses,
        delete: DeleteVerb,
        explain: Callable[[Session, ExplainRequest], Awaitable[ExplainReply]],
    ) -> None:
        config, residency, put = store.config, store.residency, operations.put
        limits = config.limits
        self._look_up = LookupVerb(operations.look_up, residency, misses, max_keys=limits.max_keys)
        self._staged_put = StagedPut(put, limits, default_mode=config.durability.mode)
        self._in_place_put = InPlacePut(put, store.reservations, residency, store.host, store.room, store.clock, config)
        self._get = AcquireVerb(
            operations.get, residency, misses, store.counters, max_keys=limits.max_keys,
            leases_per_client=limits.leases_per_client,
        )  # fmt: skip
        self._hints = HintVerb(operations.hints, max_keys=limits.max_keys)
        self._delete = delete
        self._explain = explain

    def quick(self, session: Session, op: str, request: pb.Request) -> pb.Response | None:
        """Raises KVStoreError for a request that is wrong as a whole."""
        if op == "lookup":
            return pb.Response(lookup=self._look_up.look_up(session, request.lookup))
        if op == "acquire" and request.acquire.order == pb.ACQUIRE_ORDER_WHOLE:
            held = self._get.acquire_mapped(session, request.acquire)
            return None if held is None else pb.Response(acquire=held)
        if op == "release":
            return pb.Response(release=self._get.release(session, request.release))
        if op == "touch":
            return pb.Response(touch=self._hints.touch(session, request.touch))
        if op == "hint":
            return pb.Response(hint=self._hints.hint(session, request.hint))
        if op == "prefetch":
            return pb.Response(prefetch=self._hints.prefetch(session, request.prefetch))
        if op == "ping":
            return pb.Response(ping=pb.PingReply(payload=request.ping.payload))
        return None

    def undelivered(self, session: Session, reply: pb.Response) -> None:
        """A reply could not be sent: take back what it granted."""
        if reply.HasField("acquire"):
            self._get.undo(session, reply.acquire)
        elif reply.HasField("reserve_slots"):
            self._in_place_put.undo(session, reply.reserve_slots)

    def slow(self, session: Session, op: str, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        """The answers of a request that waits for bytes; a store may have two, and has begun when this returns; an
        acquire in an order has many. Raises KVStoreError as `quick`, then or from the answers."""
        if op == "store":
            put = self._in_place_put if request.store.reservation else self._staged_put
            return _stored(put.store(session, request.store))
        if op == "acquire":
            return self._get.acquire(session, request.acquire, request.deadline_ms)
        return self._slow(session, op, request)

    def store_inline(
        self, session: Session, offer: Offer, durability: pb.DurabilityMode.ValueType
    ) -> AsyncGenerator[pb.Response, None]:
        """The answers to a put whose blocks came in its message, as those of a store."""
        return _stored(self._staged_put.store_inline(session, offer, durability))

    async def _slow(self, session: Session, op: str, request: pb.Request) -> AsyncGenerator[pb.Response, None]:
        if op == "lend":
            yield pb.Response(lend=await self._staged_put.lend(session))
        elif op == "reserve_slots":
            yield pb.Response(reserve_slots=await self._in_place_put.reserve(session, request.reserve_slots))
        elif op == "delete":
            yield pb.Response(delete=await self._delete.delete(session, request.delete))
        elif op == "explain":
            yield pb.Response(explain=await self._explain(session, request.explain))
        else:
            raise RuntimeError(f"{op} is always answered at once")


async def _stored(answers: AsyncGenerator[Stored, None]) -> AsyncGenerator[pb.Response, None]:
    async with aclosing(answers):
        async for each in answers:
            reply = pb.StoreReply(statuses=each.statuses, durability=each.durability, final=each.final)
            yield pb.Response(store=reply)
