"""The messages between the HTTP process and the scheduler's: frames of a JSON header and raw bytes.

The module owns the framing: two lengths, then the header, then the blob, which carries token ids (int32, little
endian); and the translation between the engine's values and JSON. Nothing is evaluated or unpickled.

HTTP to scheduler: add (with the prompt's tokens as blob), cancel, status, restorations (answered like status).
Scheduler to HTTP: ready or fatal (once), events (one frame a step), refused, status, worker.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvstore_engine.batching.events import Event, Finished, Token, Usage
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.constrain import Constrainer, Grammar
from kvstore_engine.sampler import SamplingSettings
from kvstore_engine.server.tools import OneCall, Turn, next_step
from kvstore_engine.tokenizer import Tokenizer

Header = dict[str, Any]
Int32Array = npt.NDArray[np.int32]
MAX_FRAME_BYTES = 64 << 20
LENGTHS = struct.Struct("<II")
_READ_BYTES = 1 << 18
_compact = json.JSONEncoder(separators=(",", ":")).encode  # kept: json.dumps makes one a call
Refusal = Literal["usage", "overloaded", "failed"]
Failure = Literal["usage", "operation", "changed"]  # of the scheduler; "changed": no other will do better
_FRAME_EVENTS = 4096  # with the most log probabilities some 10 MB, of the 64 MiB that a frame may have


class BrokenFrame(RuntimeError):
    """An error: the bytes that the other process sent are not a message of this protocol."""


def encode(header: Header, blob: bytes = b"") -> bytes:
    text = _compact(header).encode()
    return LENGTHS.pack(len(text), len(blob)) + text + blob


def pack_tokens(tokens: Int32Array) -> bytes:
    return tokens.astype("<i4").tobytes()


def unpack_tokens(blob: bytes) -> Int32Array:
    return np.frombuffer(blob, "<i4").astype(np.int32)


def lengths(raw: bytes) -> tuple[int, int]:
    """Return the lengths in bytes of a message's JSON header and of the raw bytes behind it. `raw` are the eight bytes
    at the message's beginning. Raises BrokenFrame if the lengths exceed 64 MiB together.
    """
    header, blob = LENGTHS.unpack(raw)
    if header + blob > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a frame of {header + blob} bytes")
    return header, blob


class FrameReader:
    """A reader of whole messages from the bytes that arrive on the socket `connection`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._frames = FrameBuffer()

    def receive(self) -> list[tuple[Header, bytes]]:
        """Read once from the socket, waiting if it is empty. Return the messages that are now complete, as pairs of
        header and raw bytes. Raises EOFError when the other process has closed the socket.
        """
        chunk = self._socket.recv(_READ_BYTES)
        if not chunk:
            raise EOFError
        return self._frames.feed(chunk)


class FrameBuffer:
    """The bytes that have arrived from the other process and are no whole message yet."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> list[tuple[Header, bytes]]:
        """Add `chunk`, the next bytes. Return the messages that are now complete, as pairs of header and raw bytes.
        Raises BrokenFrame for a message that is too long, ValueError for a header that is no JSON.
        """
        self._buffer += chunk
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> tuple[Header, bytes] | None:
        if len(self._buffer) < LENGTHS.size:
            return None
        header, blob = lengths(bytes(self._buffer[: LENGTHS.size]))
        end = LENGTHS.size + header + blob
        if len(self._buffer) < end:
            return None
        text, rest = self._buffer[LENGTHS.size : LENGTHS.size + header], self._buffer[LENGTHS.size + header : end]
        frame = json.loads(text), bytes(rest)
        del self._buffer[:end]
        return frame


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to the engine, as the HTTP process sends it to the scheduler process: the settings of
    `batching.RequestSettings` and some more. With `one_call` the answer ends with its first tool call. `turn` says who
    speaks after the answer: "unknown", "person", "tool" (a tool if the answer calls one, otherwise a person), or
    "tool_after_thought" (the same, when the prompt has opened a thought).
    """

    id: str
    tokens: Int32Array
    max_tokens: int
    sampling: SamplingSettings
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_end: bool = False
    logprobs: int | None = None
    grammar: Grammar | None = None
    tenant: str = ""
    priority: int = 0
    turn: Turn = "unknown"
    one_call: bool = False
    trace: str = ""

    def header(self) -> Header:
        fields: Header = {"op": "add", "id": self.id, "max_tokens": self.max_tokens, "n": self.n}
        fields["sampling"] = asdict(self.sampling)
        fields |= {"stop": list(self.stop), "ignore_end": self.ignore_end, "logprobs": self.logprobs}
        fields |= {"grammar": asdict(self.grammar) if self.grammar else None}
        fields |= {"tenant": self.tenant, "priority": self.priority}
        return fields | {"turn": self.turn, "one_call": self.one_call, "trace": self.trace}


def request_of(header: Header, tokens: Int32Array, constrainer: Constrainer, tokenizer: Tokenizer) -> Request:
    """Return the engine's request for an `Ask` with the given `header` and prompt `tokens`. `constrainer` makes its
    constraint. Raises UsageError if its settings or its grammar are wrong.
    """
    grammar, turn = header["grammar"], header["turn"]
    constraint = constrainer.constraint(Grammar(**grammar)) if grammar else None
    if header["one_call"]:
        constraint = partial(OneCall, tokenizer, turn, constraint)
    settings = RequestSettings(
        max_tokens=header["max_tokens"],
        sampling=SamplingSettings(**header["sampling"]),
        n=header["n"],
        stop=tuple(header["stop"]),
        ignore_end=header["ignore_end"],
        logprobs=header["logprobs"],
        constraint=constraint,
        next_step=None if turn == "unknown" else partial(next_step, tokenizer, turn),
        trace=header["trace"],
    )
    return Request(header["id"], tokens, settings, tenant=header["tenant"], priority=header["priority"])


def events_headers(events: Sequence[Event]) -> list[Header]:
    """Return the `events` of a step as messages for the HTTP process, each with up to 4096 events."""
    packed = [_pack(event) for event in events]
    return [{"events": packed[first : first + _FRAME_EVENTS]} for first in range(0, len(packed), _FRAME_EVENTS)]


def unpack_events(header: Header) -> list[Event]:
    return [_unpack(packed) for packed in header["events"]]


def _pack(event: Event) -> list[Any]:
    if isinstance(event, Token):
        return ["token", event.request_id, event.index, event.token, event.text, event.logprob, event.top]
    return ["end", event.request_id, event.index, event.reason, asdict(event.usage), event.message, event.text]


def _unpack(packed: list[Any]) -> Event:
    kind, request_id, index, *rest = packed
    if kind == "token":
        token, text, logprob, top = rest
        return Token(request_id, index, token, text, logprob, tuple((other, value) for other, value in top))
    reason, usage, message, text = rest
    return Finished(request_id, index, reason, Usage(**usage), message, text)
