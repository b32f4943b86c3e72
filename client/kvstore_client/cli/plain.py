"""A protobuf message as plain values for `--json`.

json_format turns 64-bit integers into strings and omits zeros depending on options that changed between
releases; this walk keeps numbers as numbers and every field present, under every protobuf release that we
support.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message


def plain(message: Message) -> dict[str, Any]:
    """Every field by its name in the .proto file; bytes as hex."""
    return {field.name: _value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _value(value: Any) -> Any:
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (str, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _value(value[key]) for key in sorted(value)}
    return [_value(item) for item in value]
