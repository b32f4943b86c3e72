"""kvctl put: stores a file in the daemon, as a named object or as the blocks of a token prefix. kvctl delete: removes
them from every tier for good.

Put works in portions that fit the staging memory, so a file may be larger than it. If a put fails half way, the
portions already stored are deleted. Stored bytes never change: with the option to replace, an object of that name is
deleted first.
"""

from __future__ import annotations

import argparse
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from kvctl.connection import in_words, not_there, open_session
from kvctl.output import FAILED, USAGE, CommandError, Output
from kvctl.target import Target, find_target
from kvstore_client.memory import Bytes
from kvstore_client.objects.named import get_head, payloads_of
from kvstore_client.payload import Payload
from kvstore_client.receipt import DURABLE, THROTTLED
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.session import Session
from kvstore_console.progress import Progress
from kvstore_console.units import human_blocks, human_bytes, human_count
from kvstore_proto.objects import head_of, object_tokens

STAGING_BYTES: Final = 64 << 20
PORTION_BYTES: Final = 64 << 20
MAX_STREAM_BYTES: Final = 4 << 30  # of what has no size: all of it is in memory before the first block is put
UNKNOWN_BLOCKS: Final = 64  # of an object whose first block is gone, so many are looked for


def put(directory: Path, arguments: argparse.Namespace) -> Output:
    target = find_target(directory, arguments)
    data = read_bytes(arguments.file)
    with (
        Progress("kvctl put") as progress,
        open_session(directory, target.fingerprint, arguments.timeout, staging_bytes=STAGING_BYTES) as session,
    ):
        stored = _Stored(progress, arguments)
        if target.name is not None:
            return _put_object(session, target.name, data, stored)
        return _put_prefix(session, target, data, stored)


class _Stored:
    """The portions of one put, and the results of their blocks so far."""

    def __init__(self, progress: Progress, arguments: argparse.Namespace) -> None:
        self._progress, self._durability = progress, arguments.durability
        self.timeout_s: float = arguments.timeout
        self.replaces: bool = arguments.replace
        self.block_bytes: int = arguments.block_size
        self.blocks = self.present = self.durable = self.nbytes = 0

    def add(
        self, session: Session, tokens: Any, payloads: Sequence[Payload], first: int, group: int, payload_bytes: int
    ) -> str:
        """Put one portion; return the reason of a failure, or ""."""
        receipt = session.put(
            tokens,
            payloads=payloads,
            first_block=first,
            group=group,
            payload_bytes=payload_bytes,
            durability=self._durability,
            wait="settled",
            deadline_s=self.timeout_s,
        )
        self.blocks += receipt.stored_blocks
        self.present += receipt.visible_blocks - receipt.stored_blocks
        self.durable += receipt.durability.count(DURABLE)
        self.nbytes += receipt.stored_blocks * payload_bytes
        self._progress.say(f"{human_blocks(self.blocks)} stored ({human_bytes(self.nbytes)})")
        if receipt.visible_blocks == len(payloads):
            return ""
        if first and receipt.statuses[0] == THROTTLED:  # the block before it was there, and is gone
            before = session.lookup(tokens[: first * session.fingerprint.block_tokens], group=group)
            if before.blocks < first and before.reason:
                return f"what was stored of it first is gone ({in_words(before.reason)}): see kvctl status"
        return receipt.reason or "no room could be made for a block"

    def output(self, label: str, **facts: object) -> Output:
        reply = {
            "blocks": self.blocks + self.present,
            "stored_blocks": self.blocks,
            "present_blocks": self.present,
            "durable_blocks": self.durable,
            "stored_bytes": self.nbytes,
            **facts,
        }
        known = self.blocks + self.present
        how = "durable" if self.durable == known else "volatile" if not self.durable else "partly durable"
        if not self.blocks:
            return Output(f"{label}: stored already, {human_blocks(self.present)}, {how}", reply)
        text = f"{label}: stored {human_blocks(self.blocks, self.nbytes)}, {how}"
        if self.present:
            text += f"; {human_count(self.present)} were there already"
        return Output(text, reply)


def _put_object(session: Session, name: str, data: Bytes, stored: _Stored) -> Output:
    head = head_of(data.data, stored.block_bytes)
    before, reason = get_head(session, name, stored.timeout_s)
    if before is not None and before.is_of(data.data):
        head = before  # what is missing of it is cut as the rest was
    elif before is not None or reason == "no_object":
        if not stored.replaces:
            raise CommandError(
                FAILED, f"{name}: an object of this name with other content is stored; --replace deletes it first"
            )
        _clear(session, name, before.blocks if before is not None else head.blocks, stored.timeout_s)
    else:
        _clear(session, name, head.blocks, stored.timeout_s)  # the tail of one whose first block is gone
    tokens, payloads = object_tokens(name, head.blocks), payloads_of(head, data)
    for first, count in _portions(head.blocks, head.block_bytes):
        wrong = stored.add(session, tokens, payloads[first : first + count], first, 0, head.payload_bytes(first))
        if wrong:
            session.delete(tokens, deadline_s=stored.timeout_s)
            _require_answer(f"{name} was not stored, put it again", wrong, stored.timeout_s)
            raise CommandError(FAILED, f"{name}: {wrong}; none of its blocks is kept")
    return stored.output(name, name=name, bytes=head.size_bytes)


def _clear(session: Session, name: str, blocks: int, timeout_s: float) -> None:
    deleted = session.delete(object_tokens(name, blocks), deadline_s=timeout_s)
    _require_answer(f"{name}: what is stored under this name was not deleted", deleted.reason, timeout_s)
    if deleted.leased or deleted.continued or deleted.reason:
        why = deleted.reason or "it is under lease"
        raise CommandError(FAILED, f"{name}: the object stored under this name cannot be deleted now: {why}")


def _require_answer(what: str, reason: str, timeout_s: float) -> None:
    """Raise CommandError if `reason` says that no daemon answered; `what` says what was not done."""
    if reason in (REASON_NO_DAEMON, REASON_DEADLINE):
        raise not_there(what, reason, timeout_s)


def _put_prefix(session: Session, target: Target, data: Bytes, stored: _Stored) -> Output:
    size = target.fingerprint.payload_bytes(target.group)
    blocks, rest = divmod(len(data), size or target.blocks)
    if not size:
        size, blocks = blocks, target.blocks
        if rest or not size:
            raise CommandError(
                USAGE,
                f"{len(data)} bytes do not divide into {target.blocks} blocks of one size, one for each of the prefix",
            )
    elif rest or not 1 <= blocks <= target.blocks:
        raise CommandError(
            USAGE,
            f"{len(data)} bytes are not 1 to {target.blocks} blocks: under this fingerprint a block has {size} bytes, "
            f"and the tokens fill {target.blocks} of them",
        )
    for first, count in _portions(blocks, size):
        payloads = [data[number * size : (number + 1) * size] for number in range(first, first + count)]
        wrong = stored.add(session, target.tokens, payloads, first, target.group, size)
        if wrong:
            known = f"{stored.blocks} of {blocks} blocks were stored"
            _require_answer(f"{target.label}: {known}, put them again", wrong, stored.timeout_s)
            raise CommandError(FAILED, f"{target.label}: {wrong}; {known}")
    return stored.output(target.label, bytes=len(data))


def _portions(blocks: int, block_bytes: int) -> list[tuple[int, int]]:
    """Return (first block, number of blocks) of each put; the last block is always in a put of its own."""
    step = max(1, PORTION_BYTES // block_bytes)
    whole = [(first, min(step, blocks - 1 - first)) for first in range(0, blocks - 1, step)]
    return [*whole, (blocks - 1, 1)]


def read_bytes(path: str) -> Bytes:
    """Return the bytes of the file `path`, mapped if possible. The path "-" stands for standard input. Raises
    CommandError, also for more than `MAX_STREAM_BYTES` from what is not a regular file.
    """
    try:
        if path == "-":
            return _read_stream(sys.stdin.buffer, "standard input")
        with open(path, "rb") as file:
            if not os.fstat(file.fileno()).st_size:  # empty, or no regular file
                return _read_stream(file, path)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise CommandError(USAGE, f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _read_stream(stream: BinaryIO, name: str) -> Bytes:
    data = stream.read(MAX_STREAM_BYTES + 1)
    if len(data) > MAX_STREAM_BYTES:
        raise CommandError(USAGE, f"{name} gives over {human_bytes(MAX_STREAM_BYTES)}: put a regular file instead")
    return np.frombuffer(data, np.uint8)


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
