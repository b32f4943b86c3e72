"""The KVStoreUnary service: the store for any language with gRPC, with the bytes in the messages.

It translates the caller into a tenant, its chain into keys, its errors into gRPC status, and bounds the calls at once.
It owns its sockets: unary.sock for the daemon's own user, and a TCP port if one is configured, which is never served
without tokens or clients' certificates. It never looks into a block. Invariant: a call sees blocks of its caller's
tenant, or of a shared pool that lists it, and of no other.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import grpc

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.trace import HEADER, from_header
from kvstore_proto.v1 import unary_pb2 as pb
from kvstore_proto.v1 import unary_pb2_grpc
from kvstored.admin.lifetime import DaemonState, Phase
from kvstored.clients.certificates import Certificates
from kvstored.clients.pressure import RETRY_MS, Pressure, Work
from kvstored.clients.sessions import ClientSession, ClientSessions
from kvstored.clients.tenants import Tenant
from kvstored.clients.tenants.tokens import Tokens
from kvstored.config import ConfigError
from kvstored.config.schema import UnarySection
from kvstored.rpc import health
from kvstored.rpc.callers import Callers, Guard, end_with
from kvstored.rpc.grpc_socket import add_unix_port, connection_options
from kvstored.rpc.health import HealthService
from kvstored.rpc.verbs.inline import InlineCalls
from kvstored.rpc.verbs.naming import NamedBlocks, blocks_of, fingerprint_of
from kvstored.telemetry import CURRENT

log = logging.getLogger(__name__)
SERVICE = pb.DESCRIPTOR.services_by_name["KVStoreUnary"].full_name
REFLECTION = "grpc.reflection.v1alpha.ServerReflection"
Request = TypeVar("Request")
Reply = TypeVar("Reply")
CALLS_BESIDE = 16  # health checks and reflection, which unary.calls does not count
AGE_MS, GRACE_MS = 600_000, 60_000  # of a connection, and of calls that are under way then
ONE_TENANTS_SHARE = 0.75
_ANSWER_SLACK_BYTES = 64 << 10


class CallLimit:
    """A bound on how many unary calls run at once, over all sockets. One tenant has three quarters of them at most, so
    that others' gets find a place; half of them are never prefetches, and a quarter never puts."""

    def __init__(self, calls: int) -> None:
        self._calls = calls
        self._under_way: Counter[str] = Counter()  # by tenant

    @contextmanager
    def hold(self, tenant: str, work: Work = Work.GET) -> Iterator[None]:
        """Count a call of `tenant` while the context lasts. Raises KVStoreError (THROTTLED) when a bound is reached."""
        all_calls, own = self._under_way.total(), self._under_way[tenant]
        if all_calls >= ceil(self._calls * work.value):
            raise KVStoreError(ErrorKind.THROTTLED, f"{all_calls} unary calls are under way already", RETRY_MS)
        if own >= ceil(self._calls * ONE_TENANTS_SHARE):
            raise KVStoreError(ErrorKind.THROTTLED, f"{own} unary calls of this tenant are under way", RETRY_MS)
        self._under_way[tenant] += 1
        try:
            yield
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant]


class UnaryService(unary_pb2_grpc.KVStoreUnaryServicer):
    """The gRPC service KVStoreUnary, for one socket. `callers` finds the tenant of a caller on that socket; `limit`
    bounds the calls at once, `pressure` the work of each tenant.
    """

    def __init__(
        self,
        calls: InlineCalls,
        callers: Callers,
        sessions: ClientSessions,
        phase: Phase,
        limit: CallLimit,
        pressure: Pressure,
        max_keys: int,
    ) -> None:
        self._calls = calls
        self._pressure = pressure
        self._callers = callers
        self._sessions = sessions
        self._phase = phase
        self._limit = limit
        self._max_keys = max_keys
        self._under_way: set[asyncio.Task[Any]] = set()

    async def Lookup(self, request: pb.UnaryLookupRequest, context: Any) -> pb.UnaryLookupReply:  # noqa: N802
        return await self._answer(request, context, self._calls.look_up)

    async def Put(self, request: pb.UnaryPutRequest, context: Any) -> pb.UnaryPutReply:  # noqa: N802
        async def put(session: ClientSession, blocks: NamedBlocks, request: pb.UnaryPutRequest) -> pb.UnaryPutReply:
            session.require_writer()
            if len(request.payloads) == len(blocks) and not blocks.are_given:
                self._sessions.note_fingerprint(session)  # only now: a request that stores nothing leaves no trace
            return await self._calls.put(session, blocks, request)

        return await self._answer(request, context, put, Work.PUT)

    async def Get(self, request: pb.UnaryGetRequest, context: Any) -> pb.UnaryGetReply:  # noqa: N802
        return await self._answer(request, context, self._calls.get)

    async def Prefetch(self, request: pb.UnaryPrefetchRequest, context: Any) -> pb.UnaryPrefetchReply:  # noqa: N802
        return await self._answer(request, context, self._calls.prefetch, Work.PREFETCH)

    async def Touch(self, request: pb.UnaryTouchRequest, context: Any) -> pb.UnaryTouchReply:  # noqa: N802
        return await self._answer(request, context, self._calls.touch)

    async def Delete(self, request: pb.UnaryDeleteRequest, context: Any) -> pb.UnaryDeleteReply:  # noqa: N802
        return await self._answer(request, context, self._calls.delete)

    async def _answer(
        self,
        request: Request,
        context: Any,
        call: Callable[[ClientSession, NamedBlocks, Request], Reply | Awaitable[Reply]],
        kind: Work = Work.GET,
    ) -> Reply:
        """Return the call's answer, with the keys if the caller gave none; a KVStoreError ends the call with its
        status.
        """
        try:
            tenant = self._callers.tenant_of_call(context)
            if self._phase.state is not DaemonState.SERVING:
                raise KVStoreError(ErrorKind.UNAVAILABLE, f"the daemon is {self._phase.state.value}")
            if self._calls.is_traced:
                said = dict(context.invocation_metadata() or ()).get(HEADER, "")
                CURRENT.set(from_header(said) if isinstance(said, str) else None)
            # Work continues when its caller gives up, and keeps its bytes: it counts until it ends.
            work = asyncio.create_task(self._work(tenant, request, call, kind))
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
        self,
        tenant: Tenant,
        request: Any,
        call: Callable[[ClientSession, NamedBlocks, Any], Reply | Awaitable[Reply]],
        kind: Work,
    ) -> Reply:
        with self._limit.hold(tenant.name, kind):
            named = request.chain
            session = self._sessions.open_call(
                tenant, fingerprint_of(named), "unary call", pool=named.pool, exact=not named.accepts_lossy
            )
            blocks = await blocks_of(session, named, self._max_keys)
            if kind is Work.PREFETCH:
                self._pressure.check(session, kind)
                reply: Any = call(session, blocks, request)
            else:
                with self._pressure.count(session, kind, self._size(session, blocks, request)):
                    reply = call(session, blocks, request)
                    if inspect.isawaitable(reply):
                        reply = await reply
            if not blocks.are_given:
                reply.keys = blocks.packed
            return reply  # type: ignore[no-any-return]

    def _size(self, session: ClientSession, blocks: NamedBlocks, request: Any) -> int:
        """Return how many bytes a call moves."""
        if isinstance(request, pb.UnaryPutRequest):
            return sum(map(len, request.payloads))
        return self._pressure.loaded_bytes(session, blocks.packed) if isinstance(request, pb.UnaryGetRequest) else 0

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # its caller may have given up: then nothing else takes it


class UnaryListeners(NamedTuple):
    """The sockets of the service KVStoreUnary. `make_service` makes the service for the callers of one socket; `own`
    returns the tenant of the daemon's own user, `by_certificate` the one of names in a client's certificate.
    """

    config: UnarySection
    make_service: Callable[[Callers], UnaryService]
    own: Callable[[], Tenant | None]
    by_certificate: Callable[[list[str]], Tenant | None]
    tokens: Tokens | None
    certificates: Certificates | None
    health: HealthService

    def bind_local(self, path: Path) -> grpc.aio.Server:
        """Return a gRPC server on the Unix socket `path`, for the daemon's own user, bound but not started. Raises
        SocketError.
        """
        local = self._server(Callers(self.tokens, self.own))
        add_unix_port(local, path)
        return local

    def bind_remote(self) -> grpc.aio.Server:
        """Return a gRPC server on the configured TCP port, for callers with a token, bound but not started. Raises
        ConfigError.
        """
        by_certificate = self.by_certificate if self.config.tls_client_ca is not None else None
        remote = self._server(Callers(self.tokens, None, by_certificate))
        _bind(remote, self.config.listen, self.certificates.credentials() if self.certificates else None)
        return remote

    def _server(self, callers: Callers) -> grpc.aio.Server:
        message_bytes = self.config.message_bytes
        server = grpc.aio.server(
            interceptors=(Guard(callers),),
            options=[
                ("grpc.max_receive_message_length", message_bytes),
                ("grpc.max_send_message_length", message_bytes + _ANSWER_SLACK_BYTES),
                ("grpc.so_reuseport", 0),  # a port that another process has must fail, not be shared
                ("grpc.max_connection_age_ms", AGE_MS),  # its client connects again; a message that trickles in ends
                ("grpc.max_connection_age_grace_ms", GRACE_MS),
                *connection_options(self.config.connections),
            ],
            maximum_concurrent_rpcs=self.config.calls + CALLS_BESIDE,
        )
        unary_pb2_grpc.add_KVStoreUnaryServicer_to_server(self.make_service(callers), server)
        self.health.serve_on(server)
        server.add_generic_rpc_handlers((Reflection(),))
        return server


class Reflection(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    """A handler of gRPC that tells a client which services there are, by server reflection."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        """Return what answers the call that `handler_call_details` name, or None if it asks for something else."""
        if handler_call_details.method != f"/{REFLECTION}/ServerReflectionInfo":
            return None
        from grpc_reflection.v1alpha import reflection, reflection_pb2  # a megabyte, only where it is asked for

        return grpc.stream_stream_rpc_method_handler(
            reflection.aio.ReflectionServicer((SERVICE, health.SERVICE, REFLECTION)).ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> None:
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None
