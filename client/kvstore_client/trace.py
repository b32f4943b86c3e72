"""The span of a trace in which requests are made, for a daemon that traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from kvstore_proto.trace import from_header

TRACE: Final[ContextVar[bytes]] = ContextVar("kvstored trace", default=b"")
"""The span of the requests of the present thread or task, as the wire has it; empty for none."""


@contextmanager
def traced(traceparent: str) -> Iterator[None]:
    """Make the requests of the `with` block part of the trace that `traceparent`, the value of W3C's header, names. A
    value that is none, or "", is ignored. Each thread and each asyncio task has a trace of its own.
    """
    context = from_header(traceparent)
    before = TRACE.set(b"" if context is None else context.packed())
    try:
        yield
    finally:
        TRACE.reset(before)
