"""What a command has to say: text for people, and the reply for machines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from kvstore_client.cli.exit_codes import OK
from kvstore_client.cli.plain import plain
from kvstore_proto.printable import printable_lines


@dataclass(frozen=True, slots=True)
class Output:
    """One command's result: `text` for people is escaped here, unless it is `painted`, made of `Line`s which have done
    so. `exit_code` is FAILED where the daemon answered but the work is not whole."""

    text: str
    reply: Message | dict[str, Any]
    exit_code: int = OK
    painted: bool = False
    aside: bool = False  # standard output has the bytes that were asked for: the text goes to standard error

    def render(self, *, as_json: bool) -> str:
        if not as_json:
            return self.text if self.painted else printable_lines(self.text)
        document = plain(self.reply) if isinstance(self.reply, Message) else self.reply
        return json.dumps(document, indent=2)  # in ASCII: the same document whatever the terminal's encoding
