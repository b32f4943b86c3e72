"""The result of a command: text for people, the reply for machines, the exit status; and the exception that carries a
failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message

from kvstore_console.printable import printable_lines

OK: Final = 0
FAILED: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
DENIED: Final = 4
MISS: Final = 5

MEANINGS: Final = {
    OK: "done",
    FAILED: "the daemon refused or failed",
    USAGE: "wrong usage",
    UNREACHABLE: "no daemon reachable",
    DENIED: "permission denied",
    MISS: "not stored, or not all of it",
}
KEY_DIGITS: Final = 12  # shown of a key's 32; --json has them all


@dataclass(frozen=True, slots=True)
class Output:
    """The result of one kvctl command: `text` for people, and a document for --json. The text is escaped here unless
    `painted` is set, which means that it is made of escaped `Line`s. `exit_code` is FAILED if the daemon answered
    but the work is incomplete. With `aside`, the text goes to standard error, because standard output has the
    requested bytes.
    """

    text: str
    reply: Message | dict[str, Any]
    exit_code: int = OK
    painted: bool = False
    aside: bool = False

    def render(self, *, as_json: bool) -> str:
        if not as_json:
            return self.text if self.painted else printable_lines(self.text)
        document = plain(self.reply) if isinstance(self.reply, Message) else self.reply
        return json.dumps(document, indent=2)  # in ASCII: the same document in every encoding


def plain(message: Message) -> dict[str, Any]:
    """Return every field of `message` by its name in the .proto file, with bytes as hex.

    json_format turns 64-bit integers into strings, and its options for zeros changed between releases. This function
    keeps numbers as numbers and every field present, under every supported protobuf release.
    """
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


class CommandError(Exception):
    """The error of a command that ended without success. It has a message for people, an exit code, and facts for
    `--json`.
    """

    def __init__(self, exit_code: int, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.facts = facts
