"""The checks of the configuration section `[events]`."""

from __future__ import annotations

import re
import string

from kvstored.config.addresses import address_of
from kvstored.config.mistakes import need, need_within, one_of
from kvstored.config.schema import EventsSection

ENCODINGS = ("map", "array")
TOPIC_FIELDS = ("node", "tenant", "model")
MAX_BUFFER_BATCHES = 1_000_000
TCP = "tcp://"
MAX_CONNECTIONS = 4096
_IPC = re.compile(r"ipc:///[^\0]{1,100}\Z")


def check_events(events: EventsSection) -> None:
    """Check the section `[events]`. Raises ConfigError."""
    for name in ("listen", "replay"):
        address = getattr(events, name)
        example = f"tcp://127.0.0.1:{5557 if name == 'listen' else 5558}"
        if address.startswith(TCP):
            address_of(f"events.{name}", address, example, TCP)
        need(
            not address or address.startswith(TCP) or bool(_IPC.match(address)),
            f'events.{name} {address!r} is no address: write "tcp://HOST:PORT" or "ipc:///PATH", for instance '
            f'"{example}"',
        )
    need(not events.replay or bool(events.listen), "events.replay does nothing without events.listen: set both")
    need(
        not events.replay or events.replay != events.listen, "events.replay must be another address than events.listen"
    )
    one_of("events.encoding", events.encoding, ENCODINGS)
    need_within("events.buffer", events.buffer, 1, MAX_BUFFER_BATCHES)
    need_within("events.connections", events.connections, 1, MAX_CONNECTIONS)
    _check_topic(events)


def _check_topic(events: EventsSection) -> None:
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(events.topic) if field is not None}
    except ValueError:
        fields = {""}
    need(
        fields <= set(TOPIC_FIELDS),
        f"events.topic {events.topic!r}: in braces there may be {', '.join(f'{{{name}}}' for name in TOPIC_FIELDS)}",
    )
    need(
        "tenant" in fields or bool(events.tenant),
        "events.topic has no {tenant}: events of all tenants would be mixed in one topic; "
        "add it, or set events.tenant to the one whose blocks are published",
    )
