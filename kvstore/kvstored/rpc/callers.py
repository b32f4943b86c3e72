"""The tenant of a unary call's caller: the daemon's own user on a socket that only it can reach, a bearer of a token,
or whom a client's certificate names.

gRPC does not know the peer, so the socket's mode and the token identify it. A caller without a tenant is rejected
before its message is read. The module does not decide what a tenant may do.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstored.clients.certificates import names_in_certificate
from kvstored.clients.tenants import Tenant
from kvstored.clients.tenants.tokens import Tokens
from kvstored.rpc import health

KIND_METADATA = "kvstored-error-kind"
RETRY_METADATA = "kvstored-retry-after-ms"
_SCHEME = "bearer "
Metadata = Iterable[tuple[str, str | bytes]]


class Callers:
    """The rule that finds the tenant of a caller on one socket. `tokens` are the bearer tokens, None if there is no
    tokens file. `own` returns the tenant of calls without a token; it is None if such calls are refused.
    `by_certificate` finds the tenant of the names in a client's certificate; it is None if clients need none."""

    def __init__(
        self,
        tokens: Tokens | None,
        own: Callable[[], Tenant | None] | None,
        by_certificate: Callable[[list[str]], Tenant | None] | None = None,
    ) -> None:
        self._tokens = tokens
        self._own = own
        self._by_certificate = by_certificate

    @property
    def takes_own(self) -> bool:
        """True when calls without a token are accepted, since only the daemon's own user reaches the socket."""
        return self._own is not None

    @property
    def wants_certificate(self) -> bool:
        """True when every caller on the socket has a certificate that was verified."""
        return self._by_certificate is not None

    def tenant_of_call(self, context: Any) -> Tenant:
        """Return the tenant of the call with this gRPC context. A caller with a certificate and a token must be the
        same tenant by both. Raises KVStoreError as `tenant_of` does."""
        metadata = context.invocation_metadata()
        if self._by_certificate is None:
            return self.tenant_of(metadata)
        names = names_in_certificate(context.auth_context())
        named = self._by_certificate(names)
        if named is None:
            raise KVStoreError(
                ErrorKind.FORBIDDEN,
                f"this certificate ({', '.join(names) or 'without a name'}) names no tenant, or several: list one of "
                "its names under [[tenant]] certificates",
            )
        if _given(metadata) and self.tenant_of(metadata) != named:
            raise KVStoreError(ErrorKind.FORBIDDEN, "the token is another tenant's than the certificate")
        return named

    def tenant_of(self, metadata: Metadata | None) -> Tenant:
        """Return the tenant of a call with this gRPC metadata. Raises KVStoreError: UNAUTHENTICATED without a known
        token, FORBIDDEN for a user without a tenant.
        """
        given = _given(metadata)
        if given:
            return self._bearer(given[0])
        if self._own is None:
            raise KVStoreError(
                ErrorKind.UNAUTHENTICATED, 'this port wants a token: send metadata "authorization: Bearer TOKEN"'
            )
        tenant = self._own()
        if tenant is None:
            raise KVStoreError(
                ErrorKind.FORBIDDEN, "the daemon's own user belongs to no tenant; list it under [[tenant]] uids"
            )
        return tenant

    def _bearer(self, header: str | bytes) -> Tenant:
        text = header if isinstance(header, str) else header.decode("latin-1")
        if self._tokens is None:
            raise KVStoreError(ErrorKind.UNAUTHENTICATED, "this daemon knows no tokens; set unary.tokens_file")
        tenant = None
        if text[: len(_SCHEME)].lower() == _SCHEME:
            tenant = self._tokens.tenant_of(text[len(_SCHEME) :].strip())
        if tenant is None:
            raise KVStoreError(ErrorKind.UNAUTHENTICATED, "the token is not known")
        return tenant


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """A gRPC interceptor that rejects callers without a tenant. On the Unix socket anyone may call the health service.
    Over TCP it needs a tenant, too, since a caller that watches health occupies a call for as long as it likes."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], details: Any) -> Any:
        is_health = details.method.startswith(f"/{health.SERVICE}/")
        has_token = bool(_given(details.invocation_metadata))
        is_named = self._callers.wants_certificate and not has_token  # whom it names is seen in the call alone
        if not (is_named or (is_health and self._callers.takes_own)):
            try:
                self._callers.tenant_of(details.invocation_metadata)
            except KVStoreError as error:
                return _refusing(error)
        return await continuation(details)


def _given(metadata: Metadata | None) -> list[str | bytes]:
    """Return the tokens in a call's metadata."""
    return [value for key, value in metadata or () if key == "authorization"]


async def end_with(context: Any, error: KVStoreError) -> None:
    """End a gRPC call with the status of `error`, and its kind and retry time in the trailing metadata."""
    trailing = ((KIND_METADATA, error.kind.name), (RETRY_METADATA, str(error.retry_after_ms)))
    await context.abort(grpc.StatusCode[error.kind.grpc_status], error.message, trailing)


def _refusing(error: KVStoreError) -> Any:
    """Return a handler that answers without reading: the handler of a unary call would get the whole message first."""

    async def refuse(_: Any, context: Any) -> None:
        await end_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)
