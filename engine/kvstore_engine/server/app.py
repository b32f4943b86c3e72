"""The HTTP application: routes, keys, limits, and the answer to every error.

Owns which path leads where, and that whatever happens becomes a response in OpenAI's shape. What a request means, the
endpoints know.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeAlias

from kvstore_engine.server import body, chat, completions, texts
from kvstore_engine.server.access_log import log_access
from kvstore_engine.server.answering import Send, send_encoded, send_error, send_json, send_stream, send_whole
from kvstore_engine.server.answers import Answers, Receive
from kvstore_engine.server.api_errors import ApiError, failed, unauthorised, unavailable
from kvstore_engine.server.exchange import ClientLeft, Exchange
from kvstore_engine.server.keys import Caller
from kvstore_engine.server.metrics import CONTENT_TYPE
from kvstore_engine.server.service import Service
from kvstore_engine.server.state import gauges, health

Planner: TypeAlias = Callable[[dict[str, Any], Caller, Service], Awaitable[completions.Plan]]
TextCall: TypeAlias = Callable[[dict[str, Any], Service], Awaitable[dict[str, Any]]]
Handler: TypeAlias = Callable[[Exchange], Awaitable[None]]
_MODEL = "/v1/models/"
_OPEN_PATHS = ("/health",)
_log = logging.getLogger(__name__)


class Application:
    """The ASGI application of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._routes: dict[tuple[str, str], Handler] = {
            ("POST", "/v1/completions"): lambda exchange: self._answer(exchange, completions.plan),
            ("POST", "/v1/chat/completions"): lambda exchange: self._answer(exchange, chat.plan),
            ("POST", "/tokenize"): lambda exchange: self._text(exchange, texts.tokenize),
            ("POST", "/detokenize"): lambda exchange: self._text(exchange, texts.detokenize),
            ("GET", "/v1/models"): self._models,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
        }
        self._paths = {path for _, path in self._routes}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        exchange, began_s = Exchange(scope, receive, send), time.perf_counter()
        try:
            await self._handle(exchange)
        except ClientLeft:
            self._service.metrics.disconnects += 1
        except asyncio.CancelledError:
            if not self._service.is_draining.is_set():
                raise
            # The time to drain is over: the client is told, whatever it has got so far.
            cut = unavailable("the server ended before the answer was complete")
            await send_error(exchange.send, cut, is_streaming=exchange.is_streaming)
        except ApiError as error:
            await send_error(exchange.send, error, is_streaming=exchange.is_streaming)
        except Exception:
            _log.exception("%s %s failed", exchange.method, exchange.path)
            unexpected = failed("an error in the server: its log says more")
            if not exchange.status or exchange.is_streaming:
                await send_error(exchange.send, unexpected, is_streaming=exchange.is_streaming)
        finally:
            path = exchange.path if exchange.path in self._paths else "other"
            self._service.metrics.responses[path, exchange.status] += 1
            log_access(exchange, began_s)

    async def _handle(self, exchange: Exchange) -> None:
        caller = self._service.keys.caller(exchange.header("authorization"))
        if caller is not None:
            exchange.caller = caller
        elif exchange.path not in _OPEN_PATHS:
            raise unauthorised()
        method = "GET" if exchange.method == "HEAD" else exchange.method
        handler = self._routes.get((method, exchange.path))
        if handler is None and method == "GET" and exchange.path.startswith(_MODEL):
            handler = self._model
        if handler is None:
            raise self._no_route(exchange)
        await handler(exchange)

    def _no_route(self, exchange: Exchange) -> ApiError:
        if exchange.path not in self._paths:
            return ApiError(404, f"there is no {exchange.path}", code="not_found")
        allowed = ", ".join(method for method, path in self._routes if path == exchange.path)
        message = f"{exchange.path} is for {allowed}, not {exchange.method}"
        return ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed})

    async def _fields(self, exchange: Exchange) -> dict[str, Any]:
        return body.parse(await exchange.body(self._service.max_body_bytes))

    async def _answer(self, exchange: Exchange, planner: Planner) -> None:
        fields = await self._fields(exchange)
        if self._service.is_draining.is_set():
            raise unavailable("the server is shutting down")
        plan = await planner(fields, exchange.caller, self._service)
        answers = Answers(self._service, plan.asks, exchange.receive)
        try:
            if plan.stream:
                await send_stream(exchange.send, plan.form, answers, include_usage=plan.include_usage)
            else:
                await send_whole(exchange.send, plan.form, answers)
        finally:
            exchange.usage = answers.total_usage()

    async def _text(self, exchange: Exchange, call: TextCall) -> None:
        value = await call(await self._fields(exchange), self._service)
        text = await asyncio.to_thread(json.dumps, value)  # a million tokens of it take a while
        await send_encoded(exchange.send, 200, text.encode())

    async def _models(self, exchange: Exchange) -> None:
        await send_json(exchange.send, 200, texts.models(self._service))

    async def _model(self, exchange: Exchange) -> None:
        await send_json(exchange.send, 200, texts.model(self._service, exchange.path.removeprefix(_MODEL)))

    async def _health(self, exchange: Exchange) -> None:
        known = self._service.keys.caller(exchange.header("authorization")) is not None
        status, value = await health(self._service, in_detail=known)
        await send_json(exchange.send, status, value)

    async def _metrics(self, exchange: Exchange) -> None:
        text = self._service.metrics.text(await self._service.engine.status(), gauges(self._service)).encode()
        headers = [(b"content-type", CONTENT_TYPE.encode()), (b"content-length", str(len(text)).encode())]
        await exchange.send({"type": "http.response.start", "status": 200, "headers": headers})
        await exchange.send({"type": "http.response.body", "body": text})
