"""One HTTP request and its response, over ASGI.

Owns the reading of the body up to a limit, and the knowledge of whether a response has begun. It never routes.
"""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from kvstore_engine.server.answering import Send
from kvstore_engine.server.answers import Receive
from kvstore_engine.server.api_errors import ApiError, invalid
from kvstore_engine.server.keys import ANYBODY, Caller

BODY_TIMEOUT_S = 120.0


class ClientLeft(Exception):
    """The client left before its request was whole."""


class Exchange:
    """`status` is 0 until the response has begun."""

    def __init__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.receive = receive
        self._send = send
        self.status = 0
        self.is_streaming = False
        self.caller: Caller = ANYBODY
        self.usage: dict[str, Any] = {}  # of an answer, as OpenAI counts it

    def header(self, name: str) -> str | None:
        wanted = name.lower().encode()
        return next((value.decode("latin-1") for key, value in self._headers if key == wanted), None)

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message.get("more_body"):
            self.is_streaming = True
        await self._send(message)

    async def body(self, most_bytes: int) -> bytes:
        """All of it. ApiError 413 if it is larger, without reading the rest, 408 if it takes too long to come."""
        announced = self.header("content-length")
        if announced is not None and not announced.isdecimal():
            raise invalid("the Content-Length header is not a number")
        if int(announced or 0) > most_bytes:
            raise _too_large(most_bytes)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._pieces(most_bytes)
        except TimeoutError:
            message = f"the body was not complete within {BODY_TIMEOUT_S:g} s"
            raise ApiError(408, message, code="request_timeout") from None

    async def _pieces(self, most_bytes: int) -> bytes:
        pieces, total = [], 0
        while True:
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            pieces.append(message.get("body", b""))
            total += len(pieces[-1])
            if total > most_bytes:
                raise _too_large(most_bytes)
            if not message.get("more_body"):
                return b"".join(pieces)


def _too_large(most_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {most_bytes} bytes", code="request_too_large")
