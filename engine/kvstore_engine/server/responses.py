"""The answers to one HTTP request, from the engine's events: one JSON object, or server-sent events.

The module assigns events to choices, notices when all have ended, stops the engine when the client has left, and owns
the HTTP side of an answer. All events of a step for one client go out in one write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from kvstore_engine.batching.events import Event, Finished, Usage
from kvstore_engine.server.api_errors import ApiError, failed, unavailable
from kvstore_engine.server.connection import DIRECT, DirectWriter
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.renderers import Renderer, server_sent
from kvstore_engine.server.service import Service

Step: TypeAlias = list[tuple[int, Event]]
_log = logging.getLogger(__name__)
_STREAM_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a proxy that collects a stream makes one long wait of it
}
_DONE = b"data: [DONE]\n\n"


class Answers:
    """The answers that one HTTP request waits for. They are numbered from 0 through all of `asks`; each ask has n
    answers.
    """

    def __init__(self, service: Service, asks: Sequence[Ask], receive: Receive) -> None:
        """Send `asks` to the engine. Raises ApiError 503 while it is not ready. `receive` is ASGI's function, which
        reports that the client has left.
        """
        self._service = service
        self._events = service.engine.submit(asks)
        self._receive = receive
        self._first = {}
        self._open = 0
        for ask in asks:
            self._first[ask.id] = self._open
            self._open += ask.n
        self.count = self._open
        self._left = {ask.id: ask.n for ask in asks}
        self.usage: list[Usage] = [Usage()] * self.count
        self._leaders = frozenset(self._first.values())

    def write_with(self, write: Callable[[Step], bool]) -> None:
        """Let `write` take each step that arrives while `events_by_step` waits. It returns False for a step that
        `events_by_step` has to yield. Steps in which an answer ends are always yielded.
        """

        def placed(events: list[Event]) -> bool:
            if any(isinstance(event, Finished) for event in events):
                return False
            try:
                return write([(self._first[event.request_id] + event.index, event) for event in events])
            except Exception:
                _log.exception("an answer could not be streamed")
                self._events.put(_broken())
                return True

        self._events.write_with(placed)

    async def events_by_step(self) -> AsyncGenerator[Step]:
        """Yield for each engine step a list of its events, as pairs of answer number and event, until all answers have
        ended. Raises ApiError if the request is refused, fails or is cut off, ClientDisconnect if the client leaves.
        Answers that still run are then cancelled.
        """
        watcher = asyncio.create_task(self._watch())
        try:
            while self._open:
                events = await self._events.next()
                if events is None:
                    self._service.metrics.disconnected()
                    raise ClientDisconnect
                yield [self._placed(event) for event in events]
        except asyncio.CancelledError:
            if not self._service.is_draining.is_set():
                raise
            # uvicorn cancels what runs when the time to drain is over: the client gets an error with what it has.
            raise unavailable("the server ended before the answer was complete") from None
        finally:
            watcher.cancel()
            self._service.engine.cancel([request_id for request_id, left in self._left.items() if left])
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    def total_usage(self) -> dict[str, Any]:
        """Return the token counts of all answers in OpenAI's form. Each prompt counts once, also for several
        answers.
        """
        leaders = [self.usage[index] for index in self._leaders]
        prompt = sum(usage.prompt_tokens for usage in leaders)
        local = sum(usage.local_tokens for usage in leaders)
        daemon = sum(usage.daemon_tokens for usage in leaders)
        generated = sum(usage.generated_tokens for usage in self.usage)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {
                "cached_tokens": local + daemon,
                "local_tokens": local,
                "daemon_tokens": daemon,
            },
        }

    def _placed(self, event: Event) -> tuple[int, Event]:
        choice = self._first[event.request_id] + event.index
        if isinstance(event, Finished):
            self._end(choice, event)
        return choice, event

    def _end(self, choice: int, event: Finished) -> None:
        self._open -= 1
        self._left[event.request_id] -= 1
        if not self._left[event.request_id]:
            self._service.engine.forget(event)
        self.usage[choice] = event.usage
        self._service.metrics.answered(event)
        if event.reason in ("failed", "cancelled"):
            raise failed(event.message or "the answer was cut off by the engine")

    async def _watch(self) -> None:
        """Wait for the client's end; the body has been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._events.put(None)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return an HTTP response with `value` as JSON, written in ASCII. So it can also contain half of a surrogate pair,
    which a request may have sent.
    """
    return Response(json.dumps(value), status, headers, "application/json")


def error_response(error: ApiError) -> Response:
    return json_response(error.body(), error.status, error.headers)


async def whole_response(renderer: Renderer, answers: Answers) -> Response:
    """Wait until all `answers` have ended, and return the response with them. Raises ApiError if one fails,
    ClientDisconnect if the client leaves.
    """
    async with contextlib.aclosing(answers.events_by_step()) as steps:
        async for step in steps:
            for index, event in step:
                renderer.chunks(index, event)
    return json_response(renderer.whole(answers.count, answers.total_usage()))


async def stream_response(renderer: Renderer, answers: Answers, *, include_usage: bool) -> ServerSentEvents:
    """Wait for the first step of `answers`, and return a response that streams them as server-sent events, written by
    `renderer`. With `include_usage` the token counts follow at the end. Raises ApiError or ClientDisconnect only before
    the stream begins.
    """
    steps = answers.events_by_step()
    first = await anext(steps)

    def write(writer: DirectWriter, step: Step) -> bool:
        if not writer.is_ready:
            return False
        if body := _chunks(renderer, step):
            writer.write(body)
        return True

    events = _events(renderer, answers, first, steps, include_usage)
    return ServerSentEvents(steps, events, lambda writer: answers.write_with(partial(write, writer)))


class ServerSentEvents(StreamingResponse):
    """A streaming HTTP response that sends the texts `events`. When it ends or is interrupted, it closes `steps`, the
    generator of the engine's events behind them, which cancels the request in the engine. `write_with` gets the
    connection's `DirectWriter`, if it has one.
    """

    def __init__(
        self,
        steps: AsyncGenerator[Step],
        events: AsyncGenerator[bytes],
        write_with: Callable[[DirectWriter], None] = lambda writer: None,
    ) -> None:
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._steps, self._write_with = steps, write_with

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. If the client leaves or reads too slowly, the body gets no end, so that the cut answer does
        not look complete.
        """
        writer = scope.get("extensions", {}).get(DIRECT)
        if writer is not None:
            self._write_with(writer)
        async with contextlib.aclosing(self._steps):
            with contextlib.suppress(ClientDisconnect):
                await self.stream_response(send)


async def _events(
    renderer: Renderer, answers: Answers, first: Step, steps: AsyncGenerator[Step], include_usage: bool
) -> AsyncGenerator[bytes]:
    """Yield the stream's events. The status is sent already, so errors are reported in the stream itself."""
    try:
        openings = [choice for index in range(answers.count) if (choice := renderer.opening(index))]
        yield b"".join(server_sent(renderer.chunk([choice])) for choice in openings) + _chunks(renderer, first)
        async for step in steps:
            if body := _chunks(renderer, step):
                yield body
        yield (server_sent(renderer.chunk([], answers.total_usage())) if include_usage else b"") + _DONE
    except ClientDisconnect:
        raise
    except ApiError as error:
        yield server_sent(error.body()) + _DONE
    except Exception:
        _log.exception("an answer could not be streamed")
        yield server_sent(_broken().body()) + _DONE


def _broken() -> ApiError:
    return failed("an error in the server: its log says more")


def _chunks(renderer: Renderer, step: Step) -> bytes:
    return b"".join([renderer.stream(index, event) for index, event in step])
