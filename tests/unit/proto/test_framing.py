"""Messages come out of a byte stream as they went in, however it was cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.framing import Frames, FrameTooLarge, frame

LIMIT = 64


@given(st.lists(st.binary(max_size=LIMIT)), st.lists(st.integers(1, 20)))
def test_messages_come_out_whole_and_in_order_however_the_stream_is_cut(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, messages))
    frames, taken = Frames(LIMIT), []
    for size in [*cuts, len(stream)]:
        frames.feed(stream[:size])
        stream = stream[size:]
        while (message := frames.take()) is not None:
            taken.append(message)
    assert taken == messages


def test_a_message_is_behind_its_length_in_four_bytes_little_endian() -> None:
    assert frame(b"abc") == b"\x03\x00\x00\x00abc"
    assert frame(bytes(0x01_02_03))[:4] == b"\x03\x02\x01\x00"


def test_what_is_too_long_is_refused_by_its_length_alone() -> None:
    frames = Frames(LIMIT)
    frames.feed(frame(b"fits") + frame(bytes(LIMIT + 1))[:4])
    assert frames.take() == b"fits"
    with pytest.raises(FrameTooLarge, match="65 bytes, more than 64"):
        frames.take()
