"""Responses: one JSON object, an error in OpenAI's form, or an answer as server-sent events while it is generated.

Owns the HTTP side of an answer. All that a step brought for one client goes out in one write.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstore_engine.server.answers import Answers, Step
from kvstore_engine.server.api_errors import ApiError, failed
from kvstore_engine.server.renderers import Json, Renderer

_log = logging.getLogger(__name__)
_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy that collects a stream makes one long wait of it
}
_compact = json.JSONEncoder(separators=(",", ":")).encode  # kept: json.dumps makes one a call
_DONE = b"data: [DONE]\n\n"


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """In ASCII, unlike Starlette's: a request may hold half of a surrogate pair, and an error repeats its fields."""
    return Response(json.dumps(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def whole_response(renderer: Renderer, answers: Answers) -> Response:
    """Once all choices have ended. ApiError if one fails, ClientDisconnect if the client leaves."""
    async with contextlib.aclosing(answers.steps()) as steps:
        async for step in steps:
            for index, event in step:
                renderer.chunks(index, event)
    return json_response(renderer.whole(answers.count, answers.total_usage()))


async def stream_response(renderer: Renderer, answers: Answers, *, include_usage: bool) -> EventStream:
    """Once there is a first step: until then a refusal is a status. ApiError and ClientDisconnect as above."""
    steps = answers.steps()
    first = await anext(steps)
    return EventStream(steps, _events(renderer, answers, first, steps, include_usage))


class EventStream(StreamingResponse):
    """Starlette's, but for its task that listens for the client's end: `Answers` has one, from before the first token
    on. It also ends `steps`, and with them the request in the engine, wherever it is interrupted.
    """

    def __init__(self, steps: AsyncGenerator[Step], events: AsyncGenerator[bytes]) -> None:
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._steps = steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A client that is gone or reads too slowly gets no end of the body, so that uvicorn cuts the connection: a
        clean end would make a cut answer look whole."""
        async with contextlib.aclosing(self._steps):
            with contextlib.suppress(ClientDisconnect):
                await self.stream_response(send)


async def _events(
    renderer: Renderer, answers: Answers, first: Step, steps: AsyncGenerator[Step], include_usage: bool
) -> AsyncGenerator[bytes]:
    """The status is sent: from here on the stream itself has to say what goes wrong."""
    try:
        openings = [choice for index in range(answers.count) if (choice := renderer.opening(index))]
        yield b"".join(_event(renderer.chunk([choice])) for choice in openings) + _chunks(renderer, first)
        async for step in steps:
            if body := _chunks(renderer, step):
                yield body
        yield (_event(renderer.chunk([], answers.total_usage())) if include_usage else b"") + _DONE
    except ClientDisconnect:
        raise
    except ApiError as error:
        yield _event(error.body()) + _DONE
    except Exception:
        _log.exception("an answer could not be streamed")
        yield _event(failed("an error in the server: its log says more").body()) + _DONE


def _chunks(renderer: Renderer, step: Step) -> bytes:
    pieces = (choice for index, event in step for choice in renderer.chunks(index, event))
    return b"".join(_event(renderer.chunk([choice])) for choice in pieces)


def _event(value: Json) -> bytes:
    return f"data: {_compact(value)}\n\n".encode()
