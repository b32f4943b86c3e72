"""Writes answers as OpenAI's objects, for completions and for chats, whole and in chunks.

The module owns the JSON, the spelling of tokens in it, and the places of marks that are invisible in a text. A renderer
serves one HTTP request: it takes each choice's events and keeps the parts that a whole answer needs.
"""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_engine.batching.events import Event, Finished, Token
from kvstore_engine.server.service import ServedModel
from kvstore_engine.server.tools import ToolCall, ToolCallReader
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.tokenizer.tokenizer import StreamingDetokenizer

Json = dict[str, Any]
_compact = json.JSONEncoder(separators=(",", ":")).encode  # kept: json.dumps makes one a call
_MARK = "\0text"  # stands for a text that follows
_FLOOR = -9999.0  # of a log probability: JSON has no infinity


def server_sent(value: Json) -> bytes:
    """Return `value` as a server-sent event."""
    return f"data: {_compact(value)}\n\n".encode()


class UnseenMarks:
    """A filter that puts the invisible marks of a tool call back into an answer's text, at the place where the model
    wrote them. The text of a token may come later than the token, because text that may become a stop string is held
    back.
    """

    def __init__(self, marks: Mapping[int, str], stream: StreamingDetokenizer) -> None:
        """Make the filter. `marks` maps the token of each invisible mark to its text; `stream` decodes the answer's
        tokens as the engine does.
        """
        self._marks, self._stream = marks, stream
        self._written = self._shown = 0  # characters
        self._waiting: deque[tuple[int, str]] = deque()

    def put(self, token: int | None, text: str) -> str:
        """Return `text`, the next text of the answer, with the marks inserted. It arrived together with `token`, or at
        the answer's end if `token` is None.
        """
        if token is not None and self._marks:
            self._written += len(self._stream.push(token))
            if token in self._marks:
                self._waiting.append((self._written, self._marks[token]))
        pieces = []
        while self._waiting and self._waiting[0][0] <= self._shown + len(text):
            place, mark = self._waiting.popleft()
            pieces += [text[: place - self._shown], mark]
            text, self._shown = text[place - self._shown :], place
        self._shown += len(text)
        return "".join((*pieces, text))


class Renderer(ABC):
    """A writer of one HTTP response in OpenAI's JSON. For a stream, `chunks` turns each event into JSON pieces; for a
    whole response, `choice` gives each answer after its end.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: ServedModel, *, with_logprobs: bool) -> None:
        self.model = model
        self.with_logprobs = with_logprobs
        self.id = f"{self.prefix}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._around: dict[int, tuple[bytes, bytes]] = {}

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """Return the JSON piece of a stream that comes before the first token of answer number `index`; None if there
        is none.
        """

    @abstractmethod
    def chunks(self, index: int, event: Event) -> list[Json]:
        """Return the JSON pieces that `event` adds to answer number `index` in a stream, and remember the event for
        `choice`.
        """

    @abstractmethod
    def choice(self, index: int) -> Json:
        """Return the JSON of the whole answer number `index`, which has ended."""

    @abstractmethod
    def text_piece(self, index: int, text: str) -> Json:
        """Return the JSON piece of a stream with `text`, which is not empty, of answer number `index`."""

    def stream(self, index: int, event: Event) -> bytes:
        """Return what `event` adds to answer number `index` as server-sent events, and remember it as `chunks` does."""
        return b"".join(server_sent(self.chunk([choice])) for choice in self.chunks(index, event))

    def text_event(self, index: int, text: str) -> bytes:
        """Return the server-sent event with `text_piece(index, text)`. All but the text is written once."""
        if index not in self._around:
            before, _, after = server_sent(self.chunk([self.text_piece(index, _MARK)])).rpartition(
                _compact(_MARK).encode()
            )
            self._around[index] = before, after
        before, after = self._around[index]
        return before + _compact(text).encode() + after if text else b""

    def chunk(self, choices: list[Json], usage: Json | None = None) -> Json:
        return self._object(self.chunk_kind, choices) | ({} if usage is None else {"usage": usage})

    def whole(self, count: int, usage: Json) -> Json:
        return self._object(self.kind, [self.choice(index) for index in range(count)]) | {"usage": usage}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self._created, "model": self.model.name, "choices": choices}


@dataclass(slots=True)
class _Completion:
    pieces: list[str]
    places: StreamingDetokenizer
    echoed: int = 0  # characters
    tokens: list[Token] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    reason: str | None = None


class CompletionRenderer(Renderer):
    """A writer of responses to completion requests. `echoes` has for each answer the text to show before it, "" for
    none.
    """

    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __init__(self, model: ServedModel, echoes: list[str], *, with_logprobs: bool) -> None:
        super().__init__(model, with_logprobs=with_logprobs)
        self._choices = [
            _Completion([echo] if echo else [], model.tokenizer.stream(continues=True), len(echo)) for echo in echoes
        ]

    def opening(self, index: int) -> Json | None:
        pieces = self._choices[index].pieces
        return self._piece(index, pieces[0], None, None) if pieces else None

    def chunks(self, index: int, event: Event) -> list[Json]:
        choice = self._choices[index]
        if event.text:
            choice.pieces.append(event.text)
        if isinstance(event, Finished):
            choice.reason = _finish_reason(event)
            return [self._piece(index, event.text, None, choice.reason)]
        logprobs = None
        if self.with_logprobs:
            choice.tokens.append(event)
            choice.offsets.append(choice.echoed + choice.places.place(event.token))
            logprobs = completion_entries(self.model.tokenizer, [event], choice.offsets[-1:])
        return [self._piece(index, event.text, logprobs, None)] if event.text or logprobs else []

    def stream(self, index: int, event: Event) -> bytes:
        if self.with_logprobs or isinstance(event, Finished):
            return super().stream(index, event)
        self._choices[index].pieces.append(event.text)
        return self.text_event(index, event.text)

    def text_piece(self, index: int, text: str) -> Json:
        return self._piece(index, text, None, None)

    def choice(self, index: int) -> Json:
        choice, logprobs = self._choices[index], None
        text = "".join(choice.pieces)
        if self.with_logprobs:
            logprobs = completion_entries(self.model.tokenizer, choice.tokens, choice.offsets)
        return self._piece(index, text, logprobs, choice.reason)

    def _piece(self, index: int, text: str, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


@dataclass(slots=True)
class _Message:
    marks: UnseenMarks
    content: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)
    reader: ToolCallReader | None = None
    reason: str | None = None


class ChatRenderer(Renderer):
    """A writer of responses to chat requests with `count` answers. With `reads_calls`, tool calls are read from the
    text in the model's format. `in_thought` says that the prompt has opened a thought, so that the answer begins inside
    it.
    """

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(
        self, model: ServedModel, count: int, *, with_logprobs: bool, reads_calls: bool, in_thought: bool = False
    ) -> None:
        super().__init__(model, with_logprobs=with_logprobs)
        self._messages = [
            _Message(
                UnseenMarks(model.call_marks.unseen, model.tokenizer.stream(continues=True)),
                reader=ToolCallReader(in_thought) if reads_calls else None,
            )
            for _ in range(count)
        ]

    def opening(self, index: int) -> Json | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None, None)

    def chunks(self, index: int, event: Event) -> list[Json]:
        message = self._messages[index]
        found = self._read(message, event)
        entries = None
        if self.with_logprobs and isinstance(event, Token):
            entries = [chat_entry(self.model.tokenizer, event)]
            message.logprobs += entries
        deltas: list[Json] = []
        for piece in found:
            if isinstance(piece, str):
                message.content.append(piece)
                deltas.append({"content": piece})
            else:
                deltas.append({"tool_calls": [{"index": len(message.calls), **piece.as_json()}]})
                message.calls.append(piece)
        if entries and not deltas:
            deltas.append({})
        chunks = [self._delta(index, delta, None, None) for delta in deltas]
        if entries:
            chunks[0]["logprobs"] = {"content": entries, "refusal": None}
        if isinstance(event, Finished):
            reason = _finish_reason(event)
            message.reason = "tool_calls" if message.calls and reason == "stop" else reason
            chunks.append(self._delta(index, {}, None, message.reason))
        return chunks

    def stream(self, index: int, event: Event) -> bytes:
        message = self._messages[index]
        if self.with_logprobs or message.reader is not None or isinstance(event, Finished):
            return super().stream(index, event)
        message.content.append(event.text)
        return self.text_event(index, event.text)

    def text_piece(self, index: int, text: str) -> Json:
        return self._delta(index, {"content": text}, None, None)

    def choice(self, index: int) -> Json:
        message = self._messages[index]
        text = "".join(message.content)
        said: Json = {"role": "assistant", "content": text if text or not message.calls else None, "refusal": None}
        if message.calls:
            said["tool_calls"] = [call.as_json() for call in message.calls]
        logprobs = {"content": message.logprobs, "refusal": None} if self.with_logprobs else None
        return {"index": index, "message": said, "logprobs": logprobs, "finish_reason": message.reason}

    def _read(self, message: _Message, event: Event) -> list[str | ToolCall]:
        if message.reader is None:
            return [event.text] if event.text else []
        found = message.reader.push(message.marks.put(event.token if isinstance(event, Token) else None, event.text))
        return found + message.reader.finish() if isinstance(event, Finished) else found

    def _delta(self, index: int, delta: Json, logprobs: Json | None, reason: str | None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}


def chat_entry(tokenizer: Tokenizer, event: Token) -> dict[str, Any]:
    """Return the JSON for one token of a chat answer, an entry of `logprobs.content`. `event` is the token's event."""
    return {
        **_entry(tokenizer, event.token, event.logprob),
        "top_logprobs": [_entry(tokenizer, token, value) for token, value in event.top],
    }


def completion_entries(tokenizer: Tokenizer, events: Sequence[Token], offsets: list[int]) -> dict[str, Any]:
    """Return the JSON of `logprobs` for the tokens `events` of a completion. `offsets` has the index in the text at
    which each token's characters begin.
    """
    return {
        "tokens": [_text(tokenizer, event.token) for event in events],
        "token_logprobs": [_floored(event.logprob) for event in events],
        "top_logprobs": [_top(tokenizer, event) for event in events],
        "text_offset": offsets,
    }


def _top(tokenizer: Tokenizer, event: Token) -> dict[str, float]:
    """Return the likeliest tokens first, and the chosen one even if it is not one of them, as in OpenAI's API."""
    values: dict[str, float] = {}
    for token, value in (*event.top, (event.token, event.logprob)):
        values.setdefault(_text(tokenizer, token), _floored(value))  # two tokens may look the same
    return values


def _entry(tokenizer: Tokenizer, token: int, logprob: float | None) -> dict[str, Any]:
    piece = tokenizer.piece(token)
    return {"token": piece.decode(errors="replace"), "logprob": _floored(logprob), "bytes": list(piece)}


def _text(tokenizer: Tokenizer, token: int) -> str:
    """Return a token's text. A part of a character is written by its bytes, as in OpenAI's API: otherwise parts would
    look alike.
    """
    piece = tokenizer.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _floored(logprob: float | None) -> float:
    return _FLOOR if logprob is None else max(_FLOOR, logprob)


def _finish_reason(event: Finished) -> str:
    """Return OpenAI's name for it: "length" also for a full context, "stop" for the model's own end."""
    return "length" if event.reason in ("length", "context") else "stop"
