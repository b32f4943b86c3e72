"""The answers to one HTTP request, as the engine's events bring them.

Owns which event belongs to which choice, when all have ended, and that the engine stops when the client has left. It
never writes JSON or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, TypeAlias

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from kvstore_engine.batching import Event, Finished, Usage
from kvstore_engine.server.api_errors import failed, unavailable
from kvstore_engine.server.messages import Ask
from kvstore_engine.server.service import Service

Step: TypeAlias = list[tuple[int, Event]]


class Answers:
    """Choice i of the j-th of `asks` has the index that it would have in a list of all of them."""

    def __init__(self, service: Service, asks: Sequence[Ask], receive: Receive) -> None:
        """Submit. ApiError 503 while there is no engine. `receive` returns once the client has left."""
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

    async def steps(self) -> AsyncGenerator[Step]:
        """The events of each step with their choices, until all have ended.

        ApiError if the request is refused, fails, or is cut off by the server's end; ClientDisconnect if the client
        leaves. What still runs is cancelled.
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
        """OpenAI's usage. Each prompt counts once, however many answers it has."""
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
        """The body has been read: what comes next is the client's end."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._events.put(None)


def finish_reason(event: Finished) -> str:
    """OpenAI's name for it: "length" also for a full context, "stop" for the model's own end."""
    return "length" if event.reason in ("length", "context") else "stop"
