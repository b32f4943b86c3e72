"""kvctl get: the bytes of a named object, or of the leading blocks of a token prefix, into a file. kvctl prefetch:
moves them to DRAM ahead of a get.

Get writes a file beside the target and renames it, or writes to standard output, only when every byte is there and
verified: a miss leaves no partial file. It reads one portion at a time, so that only one portion is under lease.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from kvctl.connection import in_words, not_read, not_there, open_session
from kvctl.output import FAILED, MISS, USAGE, CommandError, Output
from kvctl.target import Target, find_target
from kvstore_client.memory import Bytes
from kvstore_client.objects.named import get_head
from kvstore_client.results import MAY_COME, REASON_LATE
from kvstore_client.session import Session
from kvstore_console.progress import Progress
from kvstore_console.units import human_blocks, human_bytes, human_count
from kvstore_proto.objects import HEAD_BYTES, ObjectChecksum, object_tokens
from kvstore_proto.replaced_file import replaced_file, usual_mode
from kvstore_proto.token_ids import TokenIds

PORTION_BLOCKS: Final = 64
RETRY_S: Final = 0.02  # for blocks that are stored and could not be brought up: DRAM is full of what others lease
IN_MEMORY_BYTES: Final = 64 << 20  # of what goes to standard output; more is kept in a temporary file until it is whole
POLL_S: Final = 0.01
MAPPED: Final = "host"


def get(directory: Path, arguments: argparse.Namespace) -> Output:
    if arguments.json and arguments.file == "-":
        raise CommandError(USAGE, "get --json says on standard output what it did: name a file for the bytes")
    target = find_target(directory, arguments)
    with (
        Progress("kvctl get") as progress,
        open_session(directory, target.fingerprint, arguments.timeout) as session,
        whole_file(arguments.file) as file,
    ):
        reading = _Reading(session, arguments.timeout, file, progress)
        if target.name is not None:
            output = _get_object(reading, target.name)
        else:
            output = _get_prefix(reading, target, partial=arguments.partial)
    output.reply["file"] = arguments.file  # type: ignore[index]  # a dict, made below
    return Output(output.text, output.reply, output.exit_code, aside=arguments.file == "-")


class _Reading:
    """A copy of the leading blocks of chains, verified, into one file. It counts the tiers that they came from."""

    def __init__(self, session: Session, timeout_s: float, file: IO[bytes], progress: Progress) -> None:
        self.session = session
        self.timeout_s = timeout_s
        self._file = file
        self._progress = progress
        self.nbytes = self.blocks = self.promoted_bytes = 0
        self.reason = ""

    def copy(self, tokens: TokenIds, group: int, take: Callable[[int, Bytes], Bytes]) -> bool:
        """Append `take(block, payload)` of each block. Return False at the first block that cannot be had, with
        `reason` set.
        """
        keys = self.session.keys(tokens, group)
        if keys is None:
            self.reason = "no_daemon"
            return False
        deadline = time.monotonic() + self.timeout_s
        while self.blocks < len(keys):
            part = keys[self.blocks : self.blocks + PORTION_BLOCKS]
            with self.session.get(keys=part, group=group, deadline_s=self.timeout_s) as lease:
                for block in range(len(lease)):
                    payload = take(self.blocks + block, lease.payload(block))
                    self._file.write(payload.data)
                    self.nbytes += len(payload)
                if len(lease) and not lease.valid:
                    raise CommandError(FAILED, "the daemon ended the lease while its bytes were read; try again")
                self.blocks += len(lease)
                self.promoted_bytes += lease.promoted_bytes
                is_late = time.monotonic() > deadline
                awaited = (REASON_LATE,) if is_late else MAY_COME
                if len(lease) < len(part) and lease.reason not in ("", *awaited):
                    self.reason = lease.reason
                    return False
                if len(lease):
                    deadline = time.monotonic() + self.timeout_s
            if not len(lease):
                if is_late:
                    raise CommandError(
                        FAILED,
                        f"block {self.blocks} is stored but was not brought to DRAM within {self.timeout_s:g} s: no "
                        "room beside what is leased, or a slow disk (`kvctl tiers`); give more time with --timeout",
                    )
                time.sleep(RETRY_S)
            self._progress.say(f"{human_count(self.blocks)} of {human_blocks(len(keys))}")
        return True


def _get_object(reading: _Reading, name: str) -> Output:
    head, reason = get_head(reading.session, name, reading.timeout_s)
    if head is None:
        if reason == "no_object":
            raise CommandError(FAILED, f"{name}: the blocks stored under this name are no object that kvctl can read")
        raise not_there(not_read(name, reason), reason, reading.timeout_s)
    checksum = ObjectChecksum(head.checksum_kind)

    def take(block: int, payload: Bytes) -> Bytes:
        piece = payload[HEAD_BYTES:] if block == 0 else payload
        piece = piece[: head.size_bytes - reading.nbytes]
        checksum.update(piece.data)
        return piece

    if not reading.copy(object_tokens(name, head.blocks), 0, take):
        what = f"{name} is not whole, {reading.blocks} of {head.blocks} blocks are stored"
        raise not_there(what, reading.reason, reading.timeout_s, found_blocks=reading.blocks, blocks=head.blocks)
    if reading.nbytes != head.size_bytes or checksum.value != head.checksum:
        raise CommandError(FAILED, f"{name}: its blocks belong to different puts; delete it and put it again")
    return _output(name, reading)


def _get_prefix(reading: _Reading, target: Target, *, partial: bool) -> Output:
    assert target.tokens is not None
    whole = reading.copy(target.tokens, target.group, lambda block, payload: payload)
    if not reading.blocks or not (whole or partial):
        found = f"{reading.blocks} of {target.blocks} blocks are stored"
        hint = "; --partial takes them" if reading.blocks else ""
        raise not_there(
            f"{target.label}: {found}{hint}", reading.reason, reading.timeout_s,
            found_blocks=reading.blocks, blocks=target.blocks,
        )  # fmt: skip
    output = _output(target.label, reading)
    if whole:
        return output
    text = f"{output.text}; {target.blocks - reading.blocks} more are not there: {in_words(reading.reason)}"
    return Output(text, {**output.reply, "reason": reading.reason}, MISS)  # type: ignore[dict-item]


def _output(label: str, reading: _Reading) -> Output:
    reply = {"blocks": reading.blocks, "bytes": reading.nbytes, "promoted_bytes": reading.promoted_bytes, "reason": ""}
    where = f", {human_bytes(reading.promoted_bytes)} of it read from NVMe" if reading.promoted_bytes else ""
    return Output(f"{label}: {human_bytes(reading.nbytes)} in {human_blocks(reading.blocks)}{where}", reply)


@contextlib.contextmanager
def whole_file(path: str) -> Iterator[IO[bytes]]:
    """Yield a file to write into that takes the place of `path` only when the block ends without an exception."""
    target = Path(path)
    if path == "-":
        with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as spool:
            yield spool
            spool.seek(0)
            shutil.copyfileobj(spool, sys.stdout.buffer, 1 << 20)
            sys.stdout.buffer.flush()
        return
    if target.is_dir():
        raise CommandError(USAGE, f"{path} is a directory: name a file")
    try:
        if target.exists() and not target.is_file():  # a device or a pipe cannot be replaced
            with open(target, "wb") as file:
                yield file
            return
        mode = target.stat().st_mode & 0o777 if target.exists() else usual_mode()
        with replaced_file(target, durable=False, mode=mode, is_shared=True) as file:
            yield file
    except OSError as error:
        raise CommandError(FAILED, f"cannot write {path}: {error.strerror or error}") from None


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
        raise not_there(not_read(target.name, reason), reason, timeout_s)
    return object_tokens(target.name, head.blocks)
