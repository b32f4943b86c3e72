"""Calls an ASGI application without a socket: one request, the whole response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Application = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


async def call(
    application: Application,
    method: str,
    path: str,
    body: Any = None,
    *,
    headers: dict[str, str] | None = None,
    leaves: asyncio.Event | None = None,
) -> Response:
    """`body` is sent as it is if it is bytes, else as JSON. `leaves`: the client is gone once it is set."""
    raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    fields = [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": method, "path": path, "headers": fields}
    pieces = [{"type": "http.request", "body": raw, "more_body": False}]
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        if pieces:
            return pieces.pop()
        await (leaves or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    await application(scope, receive, send)
    if not sent:
        return Response(0, {}, b"")
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return Response(sent[0]["status"], names, b"".join(message.get("body", b"") for message in sent[1:]))
