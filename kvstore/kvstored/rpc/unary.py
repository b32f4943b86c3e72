"""The KVStoreUnary service: the store for any language with gRPC, with the bytes in the messages.

Translates: the caller into a tenant, its chain into keys, its errors into gRPC status. Owns the bound on calls at once.
Never looks into a block. Invariant: a call sees blocks of its caller's tenant and of no other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import unary_pb2 as pb
from kvstore_proto.v1 import unary_pb2_grpc
from kvstored.admin.lifetime import Phase, State
from kvstored.clients.sessions import Session, Sessions
from kvstored.clients.tenants import Tenant
from kvstored.rpc.callers import Callers, end_with
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.rpc.verbs.naming import NamedBlocks, blocks_of, fingerprint_of

log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["KVStoreUnary"].full_name
Request = TypeVar("Request")
Reply = TypeVar("Reply")


class CallLimit:
    """How many calls may be under way at once, over all sockets."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._under_way = 0

    def __enter__(self) -> None:
        if self._under_way >= self._calls:
            raise KVStoreError(ErrorKind.THROTTLED, f"{self._calls} unary calls are under way already", 10)
        self._under_way += 1

    def __exit__(self, *_: object) -> None:
        self._under_way -= 1


class UnaryService(unary_pb2_grpc.KVStoreUnaryServicer):
    """`callers` finds the tenant of a caller on the socket that this instance serves."""

    def __init__(
        self, calls: InlineCalls, callers: Callers, sessions: Sessions, phase: Phase, limit: CallLimit, max_keys: int
    ) -> None:
        self._calls = calls
        self._callers = callers
        self._sessions = sessions
        self._phase = phase
        self._limit = limit
        self._max_keys = max_keys
        self._under_way: set[asyncio.Task[Any]] = set()

    async def Lookup(self, request: pb.UnaryLookupRequest, context: Any) -> pb.UnaryLookupReply:  # noqa: N802
        return await self._answer(request, context, self._calls.look_up)

    async def Put(self, request: pb.UnaryPutRequest, context: Any) -> pb.UnaryPutReply:  # noqa: N802
        async def put(session: Session, blocks: NamedBlocks, request: pb.UnaryPutRequest) -> pb.UnaryPutReply:
            if len(request.payloads) == len(blocks) and not blocks.are_given:
                self._sessions.note_fingerprint(session)  # only now: a request that stores nothing leaves no trace
            return await self._calls.put(session, blocks, request)

        return await self._answer(request, context, put)

    async def Get(self, request: pb.UnaryGetRequest, context: Any) -> pb.UnaryGetReply:  # noqa: N802
        return await self._answer(request, context, self._calls.get)

    async def Prefetch(self, request: pb.UnaryPrefetchRequest, context: Any) -> pb.UnaryPrefetchReply:  # noqa: N802
        return await self._answer(request, context, self._calls.prefetch)

    async def Delete(self, request: pb.UnaryDeleteRequest, context: Any) -> pb.UnaryDeleteReply:  # noqa: N802
        return await self._answer(request, context, self._calls.delete)

    async def _answer(
        self, request: Request, context: Any, call: Callable[[Session, NamedBlocks, Request], Reply | Awaitable[Reply]]
    ) -> Reply:
        """The call's answer, with the keys where the caller gave none; a KVStoreError ends it with its status."""
        try:
            tenant = self._callers.tenant_of(context.invocation_metadata())
            if self._phase.state is not State.SERVING:
                raise KVStoreError(ErrorKind.UNAVAILABLE, f"the daemon is {self._phase.state.value}")
            # Work continues when its caller gives up, and keeps its bytes: it counts until it ends.
            work = asyncio.create_task(self._work(tenant, request, call))
            self._under_way.add(work)
            work.add_done_callback(self._ended)
            return await asyncio.shield(work)
        except KVStoreError as error:
            await end_with(context, error)
        except Exception:
            log.exception("a unary call failed")
            message = "the call failed inside the daemon; its log has the details"
            await end_with(context, KVStoreError(ErrorKind.INTERNAL, message))
        raise AssertionError("abort returned")

    async def _work(
        self, tenant: Tenant, request: Any, call: Callable[[Session, NamedBlocks, Any], Reply | Awaitable[Reply]]
    ) -> Reply:
        with self._limit:
            named = request.chain
            session = self._sessions.open_call(tenant, fingerprint_of(named), "unary call")
            blocks = await blocks_of(session, named, self._max_keys)
            reply: Any = call(session, blocks, request)
            if inspect.isawaitable(reply):
                reply = await reply
            if not blocks.are_given:
                reply.keys = blocks.packed
            return reply  # type: ignore[no-any-return]

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # its caller may have given up: then nothing else takes it
