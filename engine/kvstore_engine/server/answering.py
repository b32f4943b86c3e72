"""Sends answers: as one JSON object, or as server-sent events while they are generated.

Owns the HTTP side of an answer. All that a step brought for one client goes out in one write.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvstore_engine.server.answers import Answers, ClientGone, Step
from kvstore_engine.server.api_errors import ApiError
from kvstore_engine.server.forms import Form, Json

Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # a proxy that collects a stream makes one long wait of it
]
_compact = json.JSONEncoder(separators=(",", ":")).encode  # kept: json.dumps makes one a call
_DONE = b"data: [DONE]\n\n"


async def send_json(send: Send, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
    """One whole response."""
    await send_encoded(send, status, json.dumps(value).encode(), headers)


async def send_encoded(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """One whole response, of which `body` is the JSON."""
    fields = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    fields += [(name.lower().encode(), text.encode()) for name, text in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def send_whole(send: Send, form: Form, answers: Answers) -> None:
    """The response once all choices have ended. ApiError if one fails; silent if the client has gone."""
    try:
        async for step in answers.steps():
            for index, event in step:
                form.chunks(index, event)
    except ClientGone:
        return
    await send_json(send, 200, form.whole(answers.count, answers.total_usage()))


async def send_stream(send: Send, form: Form, answers: Answers, *, include_usage: bool) -> None:
    """Events as they come. ApiError if it fails before the first: after that the stream itself says so."""
    steps = answers.steps()
    try:
        first = await anext(steps)  # a refusal is still a status and not a stream
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        openings = [choice for index in range(answers.count) if (choice := form.opening(index))]
        begin = b"".join(_event(form.chunk([choice])) for choice in openings)
        await _write(send, begin + _chunks(form, first))
        async for step in steps:
            if body := _chunks(form, step):
                await _write(send, body)
        end = _event(form.chunk([], answers.total_usage())) if include_usage else b""
        await send({"type": "http.response.body", "body": end + _DONE})
    except ClientGone:
        return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]  # an async generator: ends the request in the engine


async def send_error(send: Send, error: ApiError, *, is_streaming: bool) -> None:
    """`error` as a response, or as the last event of a stream that has begun."""
    if is_streaming:
        await send({"type": "http.response.body", "body": _event(error.body()) + _DONE})
    else:
        await send_json(send, error.status, error.body(), error.headers)


def _chunks(form: Form, step: Step) -> bytes:
    return b"".join(_event(form.chunk([choice])) for index, event in step for choice in form.chunks(index, event))


async def _write(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


def _event(value: Json) -> bytes:
    return f"data: {_compact(value)}\n\n".encode()
