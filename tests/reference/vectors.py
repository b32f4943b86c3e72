"""Golden vectors of messages: what other languages send and read, byte for byte."""

from __future__ import annotations

from google.protobuf.message import Message


def assert_encoded(message: Message, expected: str) -> None:
    """The message is these bytes, in hexadecimal digits, and these bytes are the message."""
    assert message.SerializeToString(deterministic=True).hex() == expected
    assert type(message).FromString(bytes.fromhex(expected)) == message


def assert_later_fields_are_skipped(message: Message, expected: str) -> None:
    """A field that a later release adds does not change what this one reads."""
    later = bytes.fromhex(expected) + bytes.fromhex("fa7f03616263")  # field 2047, three bytes
    decoded = type(message).FromString(later)
    decoded.DiscardUnknownFields()
    assert decoded == message
