"""The answer of `/health`.

Owns its words. "ok": all parts work. "degraded": answers are given, but kvstored cannot be reached, so that prompts are
computed. "unavailable" (503): no answers now.
"""

from __future__ import annotations

from typing import Any

from kvstore_engine.server.service import Service


async def health(service: Service, *, in_detail: bool) -> tuple[int, dict[str, Any]]:
    """HTTP status and body. The details are for callers with a key."""
    engine = service.engine
    status = await engine.status()
    if service.is_draining.is_set():
        word = "draining"
    elif engine.state != "ready":
        word = "unavailable"
    elif status is None:
        word = "busy"  # in a long step, or waiting for a new worker: requests are still taken in
    else:
        word = "degraded" if status["kvstore"] == "degraded" else "ok"
    code = 503 if word in ("draining", "unavailable") else 200
    body: dict[str, Any] = {"status": word}
    if in_detail:
        body |= {
            "engine": {
                "state": engine.state,
                "pid": engine.pid,
                "restarts": engine.restarts,
                "requests": engine.requests,
            },
            "worker": engine.worker,
            "kvstore": status["kvstore"] if status else "unknown",
            "model": service.model.name,
            "context": engine.context,
        }
        if engine.trouble:
            body["engine"]["trouble"] = engine.trouble
        if status:
            body |= {"pool": status["pool"], "sequences": status["sequences"]}
    return code, body
