"""kvctl prefetch: have blocks moved to DRAM before they are asked for, and, if wanted, wait until they are there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvctl.connection import not_there, open_session
from kvctl.exit_codes import FAILED
from kvctl.output import Output
from kvctl.target import Target, find_target
from kvstore_client.objects import get_head
from kvstore_client.session import Session
from kvstore_console.progress import Progress
from kvstore_console.units import human_blocks, human_count
from kvstore_proto.objects import object_tokens

POLL_S: Final = 0.01
MAPPED: Final = "host"


def prefetch(
    directory: Path,
    arguments: argparse.Namespace,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Output:
    target = find_target(directory, arguments)
    with open_session(directory, target.fingerprint, arguments.timeout) as session:
        tokens = _tokens(session, target, arguments.timeout)
        begun = session.prefetch(tokens, group=target.group, budget_bytes=arguments.budget)
        found = session.lookup(tokens, group=target.group)
        if not found.blocks:
            raise not_there(f"{target.label}: nothing of it is stored", found.reason, arguments.timeout)
        mapped = found.tiers[: found.blocks].count(MAPPED)
        wanted = begun.resident_blocks + begun.scheduled_blocks
        deadline = clock() + (arguments.wait or 0.0)
        with Progress("kvctl prefetch") as progress:
            while mapped < wanted and clock() < deadline:
                sleep(POLL_S)
                found = session.lookup(tokens, group=target.group)
                mapped = found.tiers[: found.blocks].count(MAPPED)
                progress.say(f"{human_count(mapped)} of {human_blocks(wanted)} are in DRAM")
    reply = {
        "stored_blocks": found.blocks,
        "resident_blocks": begun.resident_blocks,
        "scheduled_blocks": begun.scheduled_blocks,
        "mapped_blocks": mapped,
        "reason": found.reason,
    }
    text = (
        f"{target.label}: {human_blocks(begun.resident_blocks)} in DRAM already, "
        f"{human_count(begun.scheduled_blocks)} being fetched"
    )
    left = found.blocks - wanted
    if left > 0:
        text += f"; {human_count(left)} more are over the budget or the room that prefetch may hold"
    if arguments.wait is None:
        return Output(text, reply)
    text += f"; now {human_count(mapped)} in DRAM"
    return Output(text, reply, 0 if mapped >= wanted else FAILED)


def _tokens(session: Session, target: Target, timeout_s: float) -> Any:
    if target.name is None:
        return target.tokens
    head, reason = get_head(session, target.name, timeout_s)
    if head is None:
        raise not_there(f"{target.name} is not stored", reason, timeout_s)
    return object_tokens(target.name, head.blocks)
