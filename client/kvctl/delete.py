"""kvctl delete: take a named object, or the blocks of a token prefix, out of every tier for good."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Final

from kvctl.connection import not_there, open_session
from kvctl.exit_codes import FAILED
from kvctl.output import Output
from kvctl.target import Target, find_target
from kvstore_client.objects import get_head
from kvstore_client.session import Session
from kvstore_console.units import human_blocks, human_count
from kvstore_proto.objects import object_tokens

UNKNOWN_BLOCKS: Final = 64  # of an object whose first block is gone, so many are looked for


def delete(directory: Path, arguments: argparse.Namespace) -> Output:
    target = find_target(directory, arguments)
    with open_session(directory, target.fingerprint, arguments.timeout) as session:
        tokens = _tokens(session, target, arguments.timeout)
        deleted = session.delete(tokens, group=target.group, deadline_s=arguments.timeout)
        if deleted.reason:
            raise not_there(f"{target.label} was not deleted", deleted.reason, arguments.timeout)
        kept = deleted.leased + deleted.continued
        if not deleted.blocks and not kept:
            why = session.lookup(tokens[: target.fingerprint.block_tokens], group=target.group).reason
            raise not_there(f"{target.label}: nothing of it is stored", why, arguments.timeout)
    reply = {
        "deleted_blocks": deleted.blocks,
        "deleted_bytes": deleted.payload_bytes,
        "leased_blocks": deleted.leased,
        "continued_blocks": deleted.continued,
        "missing_blocks": deleted.missing,
    }
    text = f"{target.label}: deleted {human_blocks(deleted.blocks, deleted.payload_bytes)}"
    if deleted.leased:
        text += f"; kept {human_count(deleted.leased)} under lease"
    if deleted.continued:
        text += f"; kept {human_count(deleted.continued)} that other stored blocks continue"
    return Output(text, reply, FAILED if kept else 0)


def _tokens(session: Session, target: Target, timeout_s: float) -> Any:
    if target.name is None:
        return target.tokens
    head, _ = get_head(session, target.name, timeout_s)
    return object_tokens(target.name, UNKNOWN_BLOCKS if head is None else head.blocks)
