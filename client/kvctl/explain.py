"""kvctl explain: where each block of a chain is and what a get of it would cost, or why it is missing.

Turns tokens and names into keys by a session of its own; nothing is looked up, read or moved, so explaining a block
does not change it. For tokens that are stored under other fingerprints, says which.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from kvctl.connection import open_session
from kvctl.exit_codes import UNREACHABLE, USAGE, CommandError
from kvctl.explain_source import Ask, explain_source
from kvctl.explain_text import render_chain, render_misses
from kvctl.output import Output, plain
from kvctl.target import Target, find_target, fingerprint_digits, read_fingerprint
from kvstore_client.session import Session
from kvstore_proto.fingerprint import parse_fingerprint
from kvstore_proto.identity import BlockKeys
from kvstore_proto.objects import object_tokens
from kvstore_proto.v1 import explain_pb2 as wire

PAGE_KEYS: Final = 1024
OBJECT_PAGE_BLOCKS: Final = 64
MAX_OTHER_FINGERPRINTS: Final = 32
_KEY: Final = re.compile("[0-9a-fA-F]{6,32}")
STORED, MISSING = "stored", "missing"
NEVER_STORED, OTHER_FINGERPRINT = "never_stored", "other_fingerprint"


def explain(directory: Path, arguments: argparse.Namespace) -> Output:
    with explain_source(directory, arguments.timeout) as ask:
        if arguments.recent is not None:
            request = wire.ExplainRequest(recent_misses=arguments.recent, tenant=arguments.tenant)
            reply = ask(request)
            return Output(render_misses(reply), {"misses": [plain(miss) for miss in reply.misses]})
        if arguments.keys:
            return _explain_keys(directory, ask, arguments)
        target = find_target(directory, arguments)
        with open_session(directory, target.fingerprint, arguments.timeout) as session:
            if target.name is not None:
                return _explain_object(ask, session, target)
            return _explain_prefix(directory, ask, session, target, arguments.timeout)


def _explain_keys(directory: Path, ask: Ask, arguments: argparse.Namespace) -> Output:
    fingerprint = arguments.fingerprint or ""
    if Path(fingerprint).is_file():
        fingerprint = read_fingerprint(directory, arguments).digest().hex()
    elif fingerprint:
        fingerprint = fingerprint_digits(fingerprint)
    wrong = next((key for key in arguments.keys if not _KEY.fullmatch(key)), None)
    if wrong is not None:
        raise CommandError(USAGE, f"explain: a key is 32 hex digits, or its first 6 or more, got {wrong!r}")
    request = wire.ExplainRequest(
        keys=arguments.keys,
        tenant=arguments.tenant,
        fingerprint=fingerprint,
        ancestors=len(arguments.keys) == 1,
    )
    reply = ask(request)
    label = arguments.keys[0] if len(arguments.keys) == 1 else f"{len(arguments.keys)} keys"
    return _output(label, list(reply.blocks))


def _explain_object(ask: Ask, session: Session, target: Target) -> Output:
    """Only an object's first block holds its length, and it is not read here: ask until nothing ever was stored."""
    assert target.name is not None
    blocks: list[wire.BlockExplanation] = []
    while True:
        more = min(max(len(blocks), OBJECT_PAGE_BLOCKS), PAGE_KEYS)
        tokens = object_tokens(target.name, len(blocks) + more)
        page = _ask(ask, session, target, _keys(session, tokens, target)[len(blocks) :])
        blocks += page
        if _is_unknown(page[-1]):
            break
    while len(blocks) > 1 and _is_unknown(blocks[-1]):
        blocks.pop()
    return _output(target.label, blocks)


def _explain_prefix(directory: Path, ask: Ask, session: Session, target: Target, timeout_s: float) -> Output:
    assert target.tokens is not None
    blocks = _ask(ask, session, target, _keys(session, target.tokens, target))
    elsewhere: list[dict[str, Any]] = []
    if any(_is_unknown(block) for block in blocks):
        elsewhere = _elsewhere(directory, ask, session, target, timeout_s)
    return _output(target.label, blocks, elsewhere)


def _keys(session: Session, tokens: Any, target: Target) -> BlockKeys:
    keys = session.keys(tokens, target.group)
    if keys is None:
        raise CommandError(UNREACHABLE, "the daemon went away")
    return keys


def _ask(ask: Ask, session: Session, target: Target, keys: BlockKeys) -> list[wire.BlockExplanation]:
    blocks: list[wire.BlockExplanation] = []
    for start in range(0, len(keys), PAGE_KEYS):
        request = wire.ExplainRequest(
            keys=[key.hex() for key in keys[start : start + PAGE_KEYS]],
            tenant=session.tenant,
            fingerprint=target.fingerprint.digest().hex(),
        )
        blocks += ask(request).blocks
    return blocks


def _is_unknown(block: wire.BlockExplanation) -> bool:
    return block.state == MISSING and block.cause in (NEVER_STORED, OTHER_FINGERPRINT)


def _elsewhere(directory: Path, ask: Ask, session: Session, target: Target, timeout_s: float) -> list[dict[str, Any]]:
    """Other fingerprints of this tenant under which the same tokens are stored."""
    listed = ask(wire.ExplainRequest(tenant=session.tenant)).fingerprints
    others = [item for item in listed if item.canonical and item.digest != target.fingerprint.digest().hex()]
    found: list[dict[str, Any]] = []
    for item in others[:MAX_OTHER_FINGERPRINTS]:
        fingerprint = parse_fingerprint(item.canonical.encode())
        other = Target(item.label, fingerprint, fingerprint.groups[0].group_id, tokens=target.tokens)
        if not other.blocks:
            continue
        with open_session(directory, fingerprint, timeout_s) as there:
            blocks = _ask(ask, there, other, _keys(there, other.tokens, other))
        stored = sum(block.state == STORED for block in blocks)
        if stored:
            found.append(
                {"fingerprint": item.digest, "label": item.label, "stored_blocks": stored, "blocks": len(blocks)}
            )
    return found


def _output(label: str, blocks: list[wire.BlockExplanation], elsewhere: Sequence[dict[str, Any]] = ()) -> Output:
    usable = next((number for number, block in enumerate(blocks) if block.state != STORED), len(blocks))
    load_us = sum(block.load_us for block in blocks[:usable])
    first_missing = blocks[usable] if usable < len(blocks) else None
    reply = {
        "blocks": [plain(block) for block in blocks],
        "usable_blocks": usable,
        "load_us": load_us,
        "cause": first_missing.cause if first_missing is not None else "",
        "elsewhere": list(elsewhere),
    }
    return Output(render_chain(label, blocks, usable, load_us, elsewhere), reply)
