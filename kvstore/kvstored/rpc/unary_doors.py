"""The sockets for unary calls: unary.sock for the daemon's own user, and a TCP port if one is configured.

Owns how each is bound, limited and guarded; health and reflection are served beside the calls. Never serves a TCP port
without tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_reflection.v1alpha import reflection

from kvstore_proto.v1 import unary_pb2_grpc
from kvstored.clients.certificates import Certificates
from kvstored.clients.tenants import Tenant
from kvstored.clients.tenants.tokens import Tokens
from kvstored.config import ConfigError
from kvstored.config.schema import UnarySection
from kvstored.rpc import health, unary
from kvstored.rpc.callers import Callers, Guard
from kvstored.rpc.grpc_socket import add_unix_port, connection_options
from kvstored.rpc.health import Health
from kvstored.rpc.unary import UnaryService

CALLS_BESIDE = 16  # health checks and reflection, which unary.calls does not count
AGE_MS, GRACE_MS = 600_000, 60_000  # of a connection, and of calls that are under way then
_ANSWER_SLACK_BYTES = 64 << 10


@dataclass(frozen=True)
class UnaryDoors:
    """`make_service` gives the service for the callers of one socket; `own` finds the tenant of our own user."""

    config: UnarySection
    make_service: Callable[[Callers], UnaryService]
    own: Callable[[], Tenant | None]
    tokens: Tokens | None
    certificates: Certificates | None
    health: Health

    def bind_local(self, path: Path) -> grpc.aio.Server:
        """A server that is bound to `path`, for our own user alone, and not yet started. Raises SocketError."""
        local = self._server(Callers(self.tokens, self.own))
        add_unix_port(local, path)
        return local

    def bind_remote(self) -> grpc.aio.Server:
        """A server that is bound to the TCP port, for callers with a token, and not yet started. Raises ConfigError."""
        remote = self._server(Callers(self.tokens, None))
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
        reflection.enable_server_reflection((unary.SERVICE, health.SERVICE, reflection.SERVICE_NAME), server)
        return server


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> None:
    try:
        if credentials is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from None
