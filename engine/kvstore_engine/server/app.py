"""The HTTP application: the endpoint of each path, and the responses for errors.

Each error is a response in OpenAI's form. The endpoints' modules interpret requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kvstore_engine.restore.record import RECORDS
from kvstore_engine.server import chat, completions, embeddings, inquiries
from kvstore_engine.server.api_errors import ApiError, failed, invalid, unavailable
from kvstore_engine.server.body import BodyRoom, read_fields
from kvstore_engine.server.keys import KeyOwner
from kvstore_engine.server.metrics import CONTENT_TYPE
from kvstore_engine.server.middleware import CLIENT_LEFT, RequestLog, RequireKey
from kvstore_engine.server.responses import Answers, error_response, json_response, stream_response, whole_response
from kvstore_engine.server.service import Service

Planner: TypeAlias = Callable[[dict[str, Any], KeyOwner, Service], Awaitable[completions.CompletionPlan]]
TextCall: TypeAlias = Callable[[dict[str, Any], Service], Awaitable[dict[str, Any]]]
Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

_TRACE_CHARACTERS = 55  # of a traceparent


def application(service: Service) -> Starlette:
    """Return the ASGI application of the HTTP server, with all its endpoints over `service`."""
    endpoints = _Endpoints(service)
    routes = [
        Route("/v1/completions", endpoints.answering(completions.plan), methods=["POST"]),
        Route("/v1/chat/completions", endpoints.answering(chat.plan), methods=["POST"]),
        Route("/v1/embeddings", endpoints.embeddings, methods=["POST"]),
        Route("/tokenize", endpoints.converting(inquiries.tokenize), methods=["POST"]),
        Route("/detokenize", endpoints.converting(inquiries.detokenize), methods=["POST"]),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/restorations", endpoints.restorations),
        Route("/health", endpoints.health),
        Route("/metrics", endpoints.metrics),
    ]
    starlette = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestLog, service=service, paths={route.path for route in routes}),
            Middleware(RequireKey, keys=service.keys, open_paths={"/health"}),
        ],
        exception_handlers={
            ApiError: _answer_error,
            HTTPException: _answer_http_error,
            ClientDisconnect: _no_answer,
            Exception: _answer_unexpected,
        },
    )
    starlette.router.redirect_slashes = False
    return starlette


class _Endpoints:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._bodies = BodyRoom(service.max_body_bytes)

    def answering(self, planner: Planner) -> Endpoint:
        async def answer(request: Request) -> Response:
            fields = await self._fields(request)
            if self._service.is_draining.is_set():
                raise unavailable("the server is shutting down")
            plan = await planner(fields, request.state.caller, self._service)
            trace = request.headers.get("traceparent", "")[:_TRACE_CHARACTERS]
            asks = [replace(ask, trace=trace) for ask in plan.asks] if trace else plan.asks
            answers = request.state.answers = Answers(self._service, asks, request.receive)
            if plan.stream:
                return await stream_response(plan.renderer, answers, include_usage=plan.include_usage)
            return await whole_response(plan.renderer, answers)

        return answer

    def converting(self, call: TextCall) -> Endpoint:
        async def convert(request: Request) -> Response:
            value = await call(await self._fields(request), self._service)
            text = await asyncio.to_thread(json.dumps, value)  # a million tokens of it take a while
            return Response(text, media_type="application/json")

        return convert

    async def embeddings(self, request: Request) -> Response:
        fields = await self._fields(request)
        if self._service.is_draining.is_set():
            raise unavailable("the server is shutting down")
        value = await embeddings.answer(fields, request.state.caller, self._service)
        return Response(await asyncio.to_thread(json.dumps, value), media_type="application/json")

    async def models(self, request: Request) -> Response:
        return json_response(inquiries.models(self._service))

    async def model(self, request: Request) -> Response:
        return json_response(inquiries.model(self._service, request.path_params["name"]))

    async def health(self, request: Request) -> Response:
        status, value = await inquiries.health(self._service, in_detail=request.state.is_known)
        return json_response(value, status)

    async def restorations(self, request: Request) -> Response:
        last = request.query_params.get("last", str(RECORDS))
        if not last.isdecimal() or len(last) > 9:
            raise invalid(f"last={last!r} is not a number")
        records = await self._service.engine.restorations(int(last))
        if records is None:
            raise unavailable("the engine does not answer now: try again in a moment")
        return json_response({"restorations": records})

    async def metrics(self, request: Request) -> Response:
        engine = self._service.engine
        text = self._service.metrics.text(engine, await engine.status())
        return Response(text, headers={"content-type": CONTENT_TYPE})

    async def _fields(self, request: Request) -> dict[str, Any]:
        try:
            return await read_fields(request, self._bodies)
        except ClientDisconnect:
            self._service.metrics.disconnected()
            raise


async def _no_answer(request: Request, error: Exception) -> Response:
    """Answer nothing, since the client has left; the log and the metrics record it."""
    return Response(status_code=CLIENT_LEFT)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an error of the router: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.scope["path"]
    if error.status_code == 405 and error.headers is not None:
        allowed = ", ".join(sorted(error.headers["Allow"].split(", ")))  # a set's order differs from run to run
        message = f"{path} is for {allowed}, not {request.method}"
        return error_response(ApiError(405, message, code="method_not_allowed", headers={"Allow": allowed}))
    return error_response(ApiError(404, f"there is no {path}", code="not_found"))


async def _answer_unexpected(request: Request, error: Exception) -> Response:
    return error_response(failed("an error in the server: its log says more"))
