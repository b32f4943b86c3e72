"""A small reverse proxy that sends a prompt to the node that has most of it. An example, not a product.

It serves /v1/completions and /tokenize of the engines' API, and /nodes/NAME/in or /out to put a node into service or
take it out. The prompt becomes token ids first; these are what the events name blocks by, and what is passed on.
Starlette serves, httpx asks the engines.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
import zmq.asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deploy.fleet.children import START_S, FleetError
from deploy.fleet.subscriber import Subscriber

try:
    import httpx2 as httpx
except ImportError:
    import httpx  # type: ignore[no-redef,import-not-found,unused-ignore]  # the same library under its former name

TIMEOUT_S = 120.0
WANTED_NODE = "x-fleet-wanted"  # of a request: this node, whatever the events say. For measurements
NODE, KNOWN_TOKENS = "x-fleet-node", "x-fleet-known-tokens"  # of an answer


@dataclass(frozen=True)
class Target:
    """A node, as the router sees it."""

    name: str
    engine_url: str
    events_url: str
    replay_url: str


class Router:
    """The choice. `key` opens the engines' API."""

    def __init__(self, targets: Sequence[Target], key: str) -> None:
        self._targets = {target.name: target for target in targets}
        self._out: set[str] = set()
        self._used = {target.name: 0 for target in targets}  # number of the last request
        self._requests = 0
        self._headers = {"authorization": f"Bearer {key}"}
        self._subscribers: dict[str, Subscriber] = {}
        self._http: Any = None

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[None]:
        context = zmq.asyncio.Context()
        self._subscribers = {
            name: Subscriber(context, target.events_url, target.replay_url) for name, target in self._targets.items()
        }
        following = [asyncio.create_task(each.follow()) for each in self._subscribers.values()]
        async with httpx.AsyncClient(timeout=TIMEOUT_S, headers=self._headers) as self._http:
            yield
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        context.destroy(linger=0)

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        if isinstance(body.get("prompt"), str):
            body["prompt"] = await self._token_ids(body["prompt"])
        target, known = self._choose(body["prompt"], request.headers.get(WANTED_NODE))
        asked = self._http.build_request("POST", f"{target.engine_url}/v1/completions", json=body)
        answer = await self._http.send(asked, stream=True)
        return StreamingResponse(
            _body_of(answer), answer.status_code, media_type=answer.headers.get("content-type"),
            headers={NODE: target.name, KNOWN_TOKENS: str(known)},
        )  # fmt: skip

    async def tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": await self._token_ids((await request.json())["content"])})

    async def set_state(self, request: Request) -> Response:
        name, state = request.path_params["name"], request.path_params["state"]
        if name not in self._targets or state not in ("in", "out"):
            return JSONResponse({"error": f"no node {name}, or no state {state}"}, 404)
        (self._out.add if state == "out" else self._out.discard)(name)
        return JSONResponse({"in_service": [each for each in self._targets if each not in self._out]})

    def _choose(self, prompt: Sequence[int], wanted: str | None) -> tuple[Target, int]:
        """The node in service that has most of the prompt; of equals the one that was idle for longest."""
        known = {name: each.index.leading_tokens(prompt) for name, each in self._subscribers.items()}
        serving = [wanted] if wanted else [name for name in self._targets if name not in self._out]
        best = max(serving, key=lambda name: (known[name], -self._used[name]))
        self._requests += 1
        self._used[best] = self._requests
        return self._targets[best], known[best]

    async def _token_ids(self, text: str) -> list[int]:
        """Return token ids from any engine: all have the same model."""
        name = next(name for name in self._targets if name not in self._out)
        answer = await self._http.post(
            f"{self._targets[name].engine_url}/tokenize", json={"content": text, "add_special": True}
        )
        answer.raise_for_status()
        found: list[int] = answer.json()["tokens"]
        return found


async def _engine_failed(_request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"an engine did not answer: {type(error).__name__} {error}"}, 502)


async def _body_of(answer: Any) -> AsyncIterator[bytes]:
    try:
        async for piece in answer.aiter_raw():
            yield piece
    finally:
        await answer.aclose()


class RunningRouter:
    """The proxy on `address` and `port`, in a thread of its own, until `stop`."""

    def __init__(self, targets: Sequence[Target], key: str, address: str, port: int) -> None:
        router = Router(targets, key)
        routes = [
            Route("/v1/completions", router.complete, methods=["POST"]),
            Route("/tokenize", router.tokenize, methods=["POST"]),
            Route("/nodes/{name}/{state}", router.set_state, methods=["POST"]),
        ]
        application = Starlette(
            routes=routes, lifespan=router.lifespan, exception_handlers={httpx.HTTPError: _engine_failed}
        )
        self._server = uvicorn.Server(
            uvicorn.Config(application, host=address, port=port, log_level="critical", timeout_graceful_shutdown=2)
        )
        self._thread = threading.Thread(target=self._server.run, name="router", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it serves. Raises FleetError where it does not."""
        deadline_s = time.monotonic() + START_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline_s:
                raise FleetError("the router did not start: its address or port cannot be used")
            time.sleep(0.02)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
