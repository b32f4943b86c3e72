"""The context of a trace, as W3C's `traceparent` header has it and as a request of the wire carries it.

The wire has 25 bytes: the trace's id (16), the caller's span (8) and flags (1), all big-endian. What is no such header
or message counts as none: a caller's mistake in it fails no request.
"""

from __future__ import annotations

import re
import struct
from typing import Final, NamedTuple

SAMPLED: Final = 1  # of the flags
HEADER: Final = "traceparent"
_WIRE = struct.Struct(">QQQB")
_WRITTEN = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?", re.ASCII)


class TraceContext(NamedTuple):
    """A span of a trace. A span whose `flags` have no `SAMPLED` is not to be kept."""

    trace_id: int
    span_id: int
    flags: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def packed(self) -> bytes:
        return _WIRE.pack(self.trace_id >> 64, self.trace_id & 2**64 - 1, self.span_id, self.flags)


def from_header(text: str) -> TraceContext | None:
    """Return what the value `text` of a `traceparent` header says; None if it is no valid one."""
    found = _WRITTEN.fullmatch(text.strip())
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.groups())
    return TraceContext(trace_id, span_id, flags) if trace_id and span_id else None


def from_wire(packed: bytes) -> TraceContext | None:
    """Return what the bytes `packed` of a request say; None if they say nothing."""
    if len(packed) != _WIRE.size:
        return None
    high, low, span_id, flags = _WIRE.unpack(packed)
    return TraceContext(high << 64 | low, span_id, flags) if (high or low) and span_id else None
