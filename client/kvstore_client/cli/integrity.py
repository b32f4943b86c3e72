"""What `kvctl status` says of the daemon's care for integrity: scrubber, orphans, its walk over its own books."""

from __future__ import annotations

import time

from kvstore_client.cli.units import human_bytes, human_count, human_seconds
from kvstore_proto.v1 import admin_pb2 as wire


def integrity_facts(reply: wire.StatusReply) -> list[tuple[str, str]]:
    return [
        ("scrubber", _scrubber(reply.scrub)),
        ("last full scrub", _ago(reply.scrub.last_pass_s)),
        ("orphaned blocks", human_count(reply.orphaned_blocks)),
        ("own books", _books(reply.books)),
    ]


def _scrubber(scrub: wire.ScrubStatus) -> str:
    if scrub.state in ("", "off"):
        return "off"
    text = f"{scrub.state}, {human_bytes(scrub.read_bytes)} in {human_count(scrub.read_slots)} slots read"
    return text + (f", {human_count(scrub.corrupt)} found damaged" if scrub.corrupt else "")


def _books(books: wire.BooksStatus) -> str:
    if books.broken:
        return f"BROKEN: {books.broken[0]}"
    if not books.walks:
        return "not walked yet"
    return f"hold; {human_count(books.rows)} rows walked {_ago(books.last_walk_s)}"


def _ago(at_s: float) -> str:
    return f"{human_seconds(max(0.0, time.time() - at_s))} ago" if at_s else "never"
