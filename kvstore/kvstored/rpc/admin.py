"""The Admin service: an operator's views and actions. It shows keys and sizes, never token ids or payload."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import grpc

from kvstore_console.units import human_blocks
from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc

Call = Callable[[Any], Any]
METHODS = frozenset(method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods)
log = logging.getLogger("kvstored.audit")
CALLER_METADATA = "kvstored-caller"
MAX_CALLER_CHARACTERS = 64


def serve_admin(calls: Mapping[str, Call], server: grpc.aio.Server) -> None:
    """Register the Admin service on `server`; `calls` maps each method name to its function. A KVStoreError becomes the
    gRPC status of its kind.
    """
    assert calls.keys() == METHODS, calls.keys() ^ METHODS
    servicer: Any = SimpleNamespace(**{name: _handler(name, call) for name, call in calls.items()})
    admin_pb2_grpc.add_AdminServicer_to_server(servicer, server)


def _handler(name: str, call: Call) -> Callable[[Any, Any], Any]:
    async def handle(request: Any, context: Any) -> Any:
        try:
            reply = call(request)
            if inspect.isawaitable(reply):
                reply = await reply
            audit(name, request, reply, context.invocation_metadata())
            return reply
        except KVStoreError as error:
            await context.abort(grpc.StatusCode[error.kind.grpc_status], error.message)

    return handle


def _drop(request: Any, reply: Any) -> str:
    if request.pins:
        owner = f" of {request.owner}" if request.owner else ""
        return f"drop pins{owner} of tenant {request.tenant}: {human_blocks(reply.unpinned_blocks)}"
    place = "all tiers" if request.all else request.tier
    whose = f" of {request.tenant}" if request.tenant else ""
    return (
        f"drop from {place}{whose}: {human_blocks(reply.dropped_blocks, reply.dropped_bytes)}, {reply.kept_blocks} kept"
    )


def _invalidate(request: Any, reply: Any) -> str:
    return f"invalidate {request.fingerprint}: {human_blocks(reply.blocks, reply.bytes)}, {reply.kept_blocks} kept"


def _drain(request: Any, reply: Any) -> str:
    return "drain --undo" if request.undo else f"drain: {reply.clients_left} clients left"


def _rename(request: Any, reply: Any) -> str:
    lost = f", {human_blocks(reply.replaced_blocks, reply.replaced_bytes)} replaced" if reply.replaced_blocks else ""
    return f"tenants rename {request.old} {request.new}: {human_blocks(reply.blocks, reply.bytes)}{lost}"


def _drop_tenant(request: Any, reply: Any) -> str:
    key = "key destroyed" if reply.key_destroyed else "it had no key"
    return f"tenants drop {request.name}: {human_blocks(reply.blocks, reply.bytes)}, {reply.kept_blocks} kept, {key}"


def _reload(request: Any, reply: Any) -> str:
    return f"reload: {', '.join(each.name for each in reply.applied) or 'nothing'} changed"


def _keep(request: Any, reply: Any) -> str:
    terms = " ".join(f"{field.name} {value}" for field, value in request.terms.ListFields())
    return f"{terms} of tenant {request.tenant}: {human_blocks(reply.blocks, reply.bytes)}"


def _versions(request: Any, reply: Any) -> str:
    if not request.weights:
        return ""
    newest = ", ".join(str(each.version) for each in reply.versions)
    return f"weights {request.weights} of {request.tenant} are at {newest}: {human_blocks(reply.blocks)} removed"


AUDITED: dict[str, Callable[[Any, Any], str]] = {
    "Drop": _drop,
    "Invalidate": _invalidate,
    "Drain": _drain,
    "Shutdown": lambda request, reply: "shutdown --now" if request.now else "shutdown",
    "Flush": lambda request, reply: f"flush: {reply.written_blocks} blocks written",
    "ReleaseQuarantine": lambda request, reply: "quarantine release",
    "RenameTenant": _rename,
    "DropTenant": _drop_tenant,
    "Reload": _reload,
    "SetTenant": lambda request, reply: f"tenants {'reset' if request.reset else 'set'}: {reply.tenant}",
    "Keep": _keep,
    "Versions": _versions,
    "Predictor": lambda request, reply: f"predictor {'on' if reply.enabled else 'off'}" if request.switch else "",
}


# The audit log: gRPC does not know the peer of a socket. The socket's mode admits operators only; uid and pid are what
# kvctl claims, and the line says so.


def audit(method: str, request: Any, reply: Any, metadata: Iterable[tuple[str, Any]] | None) -> None:
    """Write a successful call of an audited method to the audit log, with the caller that `metadata` names."""
    describe = AUDITED.get(method)
    said = describe(request, reply) if describe is not None else ""
    if said:
        log.info("%s, by %s", said, _caller(metadata))


def _caller(metadata: Iterable[tuple[str, Any]] | None) -> str:
    said = next((value for key, value in metadata or () if key == CALLER_METADATA), None)
    if not isinstance(said, str):
        return "an unnamed caller"
    return f"{said[:MAX_CALLER_CHARACTERS]} (claimed)"
