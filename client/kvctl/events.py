"""kvctl events: whether and where KV events are published, and the events themselves as they happen."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from kvctl.connection import AdminSocket
from kvctl.output import FAILED, CommandError, Output
from kvstore_console.printable import printable
from kvstore_proto.v1 import admin_pb2 as wire
from kvstore_proto.version import pip_install

EXTRA: Final = "events"
POLL_MS: Final = 200
_HERE: Final = (("//*:", "//127.0.0.1:"), ("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:"))
_COUNTERS: Final = ("published_events", "replayed_batches", "event_snapshots", "event_restarts")
_FIELDS: Final = {  # of events that are arrays, in order
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name",
                    "extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
    "BlockRemoved": ("block_hashes", "medium", "group_idx", "locality"),
    "AllBlocksCleared": (),
}  # fmt: skip


def events(directory: Path, arguments: argparse.Namespace) -> Output:
    """Show where the daemon publishes KV events (messages to routers), or follow the events. Raises CommandError if
    none are published or a Python package is missing.
    """
    with AdminSocket(directory, arguments.timeout) as admin:
        settings = _settings(admin)
        counters = admin.call("Status", wire.StatusRequest(), wire.StatusReply).counters
    if not settings["listen"]:
        raise CommandError(
            FAILED,
            "KV events are off; set events.listen in the daemon's configuration, for instance "
            '"tcp://127.0.0.1:5557", and start it again',
        )
    if arguments.follow:
        _follow(settings["listen"], arguments)
        return Output("", {"address": settings["listen"]}, aside=True)
    facts = {**settings, **{name: counters[name] for name in _COUNTERS}}
    text = "\n".join(f"{name.replace('_', ' '):18}{value if value != '' else 'none'}" for name, value in facts.items())
    return Output(text, facts)


def _settings(admin: AdminSocket) -> dict[str, str]:
    found = {"listen": "", "replay": "", "topic": "", "encoding": "", "tokens": "", "tenant": ""}
    for each in admin.call("Config", wire.ConfigRequest(), wire.ConfigReply).settings:
        if each.section == "events" and each.key in found:
            found[each.key] = (each.in_force or each.written).strip('"')
    return found


def _follow(address: str, arguments: argparse.Namespace) -> None:
    """Print events until interrupted, or until `--count` of them have come."""
    try:
        import msgspec
        import zmq
    except ImportError as error:
        raise CommandError(FAILED, f"events --follow needs {error.name}: {pip_install(EXTRA)}") from None
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.IPV6, 1)
    for anywhere, here in _HERE:
        address = address.replace(anywhere, here)
    subscriber.connect(address)
    subscriber.subscribe(b"")
    left = arguments.count or -1
    try:
        while left:
            if not subscriber.poll(POLL_MS):
                continue
            topic, number, payload = subscriber.recv_multipart()
            name = topic.decode(errors="replace")
            if arguments.tenant and arguments.tenant not in _words(name):
                continue
            batch = msgspec.msgpack.decode(payload)
            for event in _named(batch[1]):
                _show(event, batch[0], name, int.from_bytes(number, "big"), as_json=arguments.json)
                left -= 1
                if not left:
                    return
    finally:
        context.destroy(linger=0)


def _words(topic: str) -> set[str]:
    """Return the words in `topic` that may be a tenant's name, for every form of topic."""
    parts = topic.split("@")
    return {*parts, *(part[at + 1 :] for part in parts for at, letter in enumerate(part) if letter in "./:")}


def _named(found: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of either encoding as maps."""
    for event in found:
        if isinstance(event, dict):
            yield event
        else:
            yield {"type": event[0], **dict(zip(_FIELDS.get(event[0], ()), event[1:], strict=False))}


def _show(event: Mapping[str, Any], time_s: float, topic: str, number: int, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"ts": time_s, "topic": topic, "seq": number, **event}), flush=True)
        return
    clock = time.strftime("%H:%M:%S", time.localtime(time_s))
    hashes = event.get("block_hashes", [])
    where = " ".join(filter(None, (event.get("medium"), event.get("locality"))))
    shown = " ".join(f"{each:016x}" for each in hashes[:3]) + (" …" if len(hashes) > 3 else "")
    blocks = f"{len(hashes)} blocks" if len(hashes) != 1 else "1 block"
    line = f"{clock} {topic} {number} {event['type']}"
    print(printable(f"{line} {where} {blocks} {shown}" if hashes else line), flush=True)
