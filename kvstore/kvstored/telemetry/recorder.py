"""`serve --record FILE`: the lookups, gets, puts and hints of clients, one JSON line each, gzip; the simulator reads
it.

The module owns the file and the thread that writes it. The control thread only puts an event into a bounded queue; if
the queue is full, the event is dropped and counted. Payload and names of tenants are never written, and token ids only
if `daemon.record_tokens` asks for them. Keys are cut to 64 bits, or hashed where something is encrypted at rest, and a
key that was written before stands for its whole chain, so a long session costs a few new keys a turn. After a kill -9
the file is whole up to some second before it. It is closed at `FILE_BYTES_MAX`. Format: docs/traces.md.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import threading
from array import array
from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import Empty, Full, Queue
from typing import BinaryIO

from kvstore_proto.identity import KEY_BYTES, NO_PARENT

log = logging.getLogger(__name__)
VERSION = 2  # 1 had no hints
ID_BYTES = 8
FILE_BYTES_MAX = 1 << 30
_QUEUED_EVENTS = 16_384
_KNOWN_KEYS = 1 << 18
_FLUSH_S = 1.0


@dataclass(frozen=True, slots=True)
class Hinted:
    """A client's hint, as it is recorded. None and 0 stand for fields that were not given."""

    will_continue: float | None = None
    next_step: int = 0
    answer_tokens: int = 0
    due_in_ms: int | None = None


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a client, as it is recorded. `keys` are packed and in chain order; `parent` is the key before the
    first.

    `found` is the number of readable blocks or, for a put, of stored ones. `block_tokens` comes from the client's
    fingerprint; `prompt_tokens` is 0 if not known. `hinted` is the content of a hint. `tokens` are the token ids of the
    blocks `keys`, packed as 32-bit numbers, or empty.
    """

    op: str
    at_ns: int
    tenant: int
    client: int
    block_tokens: int
    keys: bytes
    parent: bytes
    found: int
    prompt_tokens: int = 0
    hinted: Hinted | None = None
    tokens: bytes = b""


class Recorder:
    """A writer of clients' requests to the trace file `path`, which is created at once (mode 0600). Raises OSError if
    it exists or cannot be created. With `hides_keys` it has hashes of keys, under a key that is in no file.
    """

    def __init__(self, path: Path, started_ns: int, *, hides_keys: bool = False) -> None:
        self._hash_key = os.urandom(ID_BYTES * 4) if hides_keys else b""
        self._path = path
        self._started_ns = started_ns
        self._file = _new_file(path)
        self._events: Queue[RecordedRequest | None] = Queue(_QUEUED_EVENTS)
        self.dropped = 0
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def note(self, event: RecordedRequest) -> None:
        """Queue a request to be written. It takes about two microseconds and never waits; when the queue is full, the
        request is dropped and counted.
        """
        try:
            self._events.put_nowait(event)
        except Full:
            self.dropped += 1

    def close(self) -> None:
        """Write the queued requests and close the file. It waits for 10 s at most if a write hangs."""
        self._events.put(None)
        self._thread.join(timeout=10)
        if self.dropped:
            log.warning("%d requests are missing from %s: it was full, or they came too fast", self.dropped, self._path)

    # In the thread

    def _run(self) -> None:
        try:
            with self._file, gzip.GzipFile(fileobj=self._file, mode="wb", compresslevel=6) as packed:
                packed.write(_line({"format": "kvstored", "version": VERSION}))
                packed.flush()
                self._write_all(packed)
        except OSError as error:
            log.error("recording to %s has ended: %s", self._path, error.strerror or error)
            self._swallow()

    def _write_all(self, packed: gzip.GzipFile) -> None:
        while True:
            try:
                event = self._events.get(timeout=_FLUSH_S)
            except Empty:
                packed.flush()
                self._file.flush()
                continue
            if event is None:
                return
            packed.write(_line(self._row(event)))
            if self._file.tell() > FILE_BYTES_MAX:
                log.warning("recording has ended: %s has reached %d bytes", self._path, FILE_BYTES_MAX)
                self._swallow()
                return

    def _swallow(self) -> None:
        """Drop queued events until `close`, so that the queue does not fill up: the file has ended."""
        while self._events.get() is not None:
            self.dropped += 1

    def _id(self, key: bytes) -> bytes:
        return blake2b(key, key=self._hash_key, digest_size=ID_BYTES).digest() if self._hash_key else key[:ID_BYTES]

    def _row(self, event: RecordedRequest) -> dict[str, object]:
        """Return the event as its line: the last key that was written before, then the keys after it."""
        keys = [self._id(event.keys[at : at + KEY_BYTES]) for at in range(0, len(event.keys), KEY_BYTES)]
        known = self._known
        new = next((place for place in range(len(keys), 0, -1) if keys[place - 1] in known), 0)
        before = keys[new - 1] if new else self._id(event.parent) if event.parent != NO_PARENT else b""
        for key in keys if event.hinted is None else ():  # a hint may name the end of a chain alone
            known[key] = None
            known.move_to_end(key)
        while len(known) > _KNOWN_KEYS:
            known.popitem(last=False)
        row: dict[str, object] = {
            "t": round((event.at_ns - self._started_ns) / 1e9, 6),
            "op": event.op, "n": event.tenant, "c": event.client, "b": event.block_tokens, "f": event.found,
        }  # fmt: skip
        if event.prompt_tokens:
            row["i"] = event.prompt_tokens
        if event.hinted is not None:
            said = event.hinted
            row |= {"w": said.will_continue, "s": said.next_step or None, "a": said.answer_tokens or None}
            row["d"] = said.due_in_ms
        if event.tokens:
            row["x"] = array("i", event.tokens).tolist()
        if before:
            row["p"] = before.hex()
        if new < len(keys):
            row["k"] = b"".join(keys[new:]).hex()
        return {name: value for name, value in row.items() if value is not None}


def _new_file(path: Path) -> BinaryIO:
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")
    except FileExistsError as error:
        raise OSError(error.errno, "there is a file already, and a recording overwrites none", str(path)) from None
    except OSError as error:
        raise OSError(error.errno, f"cannot record: {error.strerror}", str(path)) from None


def _line(row: dict[str, object]) -> bytes:
    return json.dumps(row, separators=(",", ":")).encode() + b"\n"
