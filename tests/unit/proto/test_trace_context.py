"""A trace's context: what W3C's header says is what the wire says, and what is none fails nothing."""

from __future__ import annotations

import pytest

from kvstore_proto.trace import TraceContext, from_header, from_wire

TRACE, SPAN = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
HEADER = f"00-{TRACE:032x}-{SPAN:016x}-01"


@pytest.mark.parametrize(
    "text",
    ["", HEADER[:-1], HEADER.upper(), "ff" + HEADER[2:], HEADER.replace(f"{TRACE:032x}", "0" * 32), f"{HEADER}\n\n-"],
)
def test_what_is_no_header_is_no_trace(text: str) -> None:
    assert from_header(text) is None and from_wire(text.encode()) is None


def test_headers_and_wire_say_the_same() -> None:
    context = from_header(HEADER)
    assert context == TraceContext(TRACE, SPAN, 1) and from_wire(context.packed()) == context
    assert from_header(f"01-{HEADER[3:]}-later") == context
    assert len(context.packed()) == 25 and from_wire(bytes(25)) is None
