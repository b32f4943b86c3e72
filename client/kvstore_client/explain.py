"""Explanations of a session's own blocks, in as many requests as their number takes."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvstore_client.daemon_session import DaemonSession
from kvstore_client.errors import invalid
from kvstore_proto.v1 import kvstore_pb2 as wire
from kvstore_proto.v1.explain_pb2 import ExplainReply, ExplainRequest

KEYS_A_REQUEST = 4096  # what the daemon explains at once


def checked(request: ExplainRequest) -> ExplainRequest:
    """Return the request. Raises KVStoreError(INVALID) for what is none."""
    if not isinstance(request, ExplainRequest):
        raise invalid(f"request must be an ExplainRequest, got {type(request).__name__}")
    return request


def explain(
    daemon: DaemonSession, request: ExplainRequest, deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> ExplainReply | None:
    """Return what the daemon says; None unless all of it came in time. `recent_misses` and fingerprints are the first
    answer's."""
    until, whole = clock() + deadline_s, ExplainReply()
    for first in range(0, max(len(request.keys), 1), KEYS_A_REQUEST):
        part = ExplainRequest()
        part.CopyFrom(request)
        del part.keys[:]
        part.keys.extend(request.keys[first : first + KEYS_A_REQUEST])
        if first:
            part.recent_misses = 0
        answer = daemon.call(wire.Request(explain=part), max(until - clock(), 0.001))
        if isinstance(answer, str):
            return None
        if first:
            whole.blocks.extend(answer.explain.blocks)
        else:
            whole = answer.explain
    return whole
