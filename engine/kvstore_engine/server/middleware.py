"""The steps around every request: its key, its line in the log, its metrics.

The module owns their order: a request without a key is logged and counted as well.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvstore_console.printable import printable
from kvstore_engine.server.api_errors import unauthorised, unavailable
from kvstore_engine.server.keys import ANYBODY, KeyRing
from kvstore_engine.server.responses import error_response
from kvstore_engine.server.service import Service

access_log = logging.getLogger("kvengine.access")
MAX_PATH_CHARACTERS = 200
CLIENT_LEFT = 499  # in the log and the metrics: the client left before the answer began


class RequestLog:
    """An ASGI middleware that logs and counts each HTTP request by its path. All paths that are not in `paths` count as
    "other".
    """

    def __init__(self, app: ASGIApp, service: Service, paths: Collection[str]) -> None:
        self._app, self._service, self._paths = app, service, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began_s, status = time.perf_counter(), 0

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if status or not self._service.is_draining.is_set():
                raise
            # uvicorn cancels what runs when the time to drain is over.
            await error_response(unavailable("the server ended before it answered"))(scope, receive, noted)
        except Exception:
            status = status or 500  # Starlette answers behind this one, and uvicorn logs the error
            raise
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.responded(path, status or CLIENT_LEFT)
            log_access(scope, status or CLIENT_LEFT, time.perf_counter() - began_s)


class RequireKey:
    """An ASGI middleware that refuses requests without a valid API key, except on `open_paths`. It stores the key's
    owner in `state["caller"]`.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = self._keys.caller(Headers(scope=scope).get("authorization"))
            if caller is None and scope["path"] not in self._open_paths:
                return await error_response(unauthorised())(scope, receive, send)
            state = scope.setdefault("state", {})
            state["caller"], state["is_known"] = caller or ANYBODY, caller is not None
        await self._app(scope, receive, send)


def log_access(scope: Scope, status: int, seconds: float) -> None:
    """Write one line to the access log: the caller's tenant, the request of `scope`, its `status`, its time in
    `seconds`, and its tokens.
    """
    state = scope.get("state", {})
    caller, answers = state.get("caller", ANYBODY), state.get("answers")
    tokens = answers.total_usage() if answers else None
    access_log.info(
        "%s %s%s: %d in %.0f ms%s",
        scope["method"],
        printable(scope["path"][:MAX_PATH_CHARACTERS]),
        f" of {caller.tenant}" if caller.tenant else "",
        status,
        seconds * 1e3,
        f", {tokens['prompt_tokens']} + {tokens['completion_tokens']} tokens" if tokens else "",
    )
