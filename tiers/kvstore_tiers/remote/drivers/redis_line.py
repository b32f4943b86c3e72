"""A connection to a redis server, with a deadline for each call, whose values go straight into memory.

redis-py connects, logs in, and packs commands. Replies are read here: its own parser returns a value as bytes, which
costs two more copies and holds the GIL for them. Here the socket fills the memory for the value. Only protocol 2 is
supported. After any error other than a reply of the server the connection is closed, and `use` opens it anew.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from redis.connection import PythonRespSerializer
from redis.exceptions import ResponseError

BUFFER_BYTES = 16 << 10  # more of it would be copied twice, less costs more calls for small replies
JOINED_BYTES = 6000  # words of a command up to this length are sent as one piece

Reply: TypeAlias = "str | bytes | int | ResponseError | list[Reply] | None"


class Replies:
    """A parser of the answers of one Redis server, which replaces redis-py's own. Its methods raise TimeoutError when
    the time `deadline` is over, and ConnectionError when the server closes the connection or sends something that is no
    reply.
    """

    def __init__(self) -> None:
        self.deadline = 0.0  # of time.monotonic
        self._socket: socket.socket | None = None
        self._buffer = bytearray(BUFFER_BYTES)
        self._start = self._end = 0  # of what was received and not read

    # What redis-py asks of a parser

    def on_connect(self, connection: Any) -> None:
        self._socket = connection._sock
        self._start = self._end = 0

    def on_disconnect(self) -> None:
        self._socket = None

    def can_read(self, timeout: float) -> bool:
        """Return True if bytes can be read within `timeout` seconds. On an idle connection this means that the server
        closed it.
        """
        poll = select.poll()
        poll.register(self._live_socket(), select.POLLIN)
        return self._start < self._end or bool(poll.poll(timeout * 1000))

    def read_response(self, **_: object) -> Reply:
        """Return the next reply of the server. A reply that is an error is returned as a ResponseError, not raised."""
        kind, rest = self._line()
        match kind:
            case "+":
                return rest
            case "-":
                return ResponseError(rest)
            case ":":
                return _number(rest)
            case "$":
                size = _number(rest)
                if size < 0:
                    return None
                value = bytearray(size)
                self._fill(memoryview(value))
                self._end_of_value()
                return bytes(value)
            case "*":
                return [self.read_response() for _ in range(_number(rest))]
        raise ConnectionError(f"the server does not speak redis: it answered {kind + rest!r:.60}")

    # What the driver asks

    def read_into(self, memory: memoryview) -> int | ResponseError:
        """Read the reply to a GET command, and return the value's length in bytes, 0 if there is no value. The value is
        copied into `memory`, or skipped if it is longer. A reply that is an error is returned as a ResponseError, not
        raised.
        """
        kind, rest = self._line()
        if kind == "-":
            return ResponseError(rest)
        if kind != "$":
            raise ConnectionError(f"the server does not speak redis: it answered {kind + rest!r:.60} to GET")
        size = _number(rest)
        if size < 0:
            return 0
        if size <= len(memory):
            self._fill(memory[:size])
        else:
            self._skip(size)
        self._end_of_value()
        return size

    def set_timeout(self) -> None:
        """Set the socket's timeout to the time that is left until the deadline. Raises TimeoutError if none is left."""
        remaining_s = self.deadline - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError("the store did not answer in time")
        self._live_socket().settimeout(remaining_s)

    # Bytes

    def _live_socket(self) -> socket.socket:
        if self._socket is None:
            raise ConnectionError("the connection is closed")
        return self._socket

    def _receive(self, memory: memoryview | bytearray) -> int:
        self.set_timeout()
        received = self._live_socket().recv_into(memory)
        if not received:
            raise ConnectionError("the server closed the connection")
        return received

    def _line(self) -> tuple[str, str]:
        """Return the two parts of a reply's first line: its kind, and the rest."""
        while (found := self._buffer.find(b"\r\n", self._start, self._end)) < 0:
            if self._start:
                kept = self._end - self._start
                self._buffer[:kept] = self._buffer[self._start : self._end]
                self._start, self._end = 0, kept
            if self._end == BUFFER_BYTES:
                raise ConnectionError("the server does not speak redis: its line has no end")
            self._end += self._receive(memoryview(self._buffer)[self._end :])
        line = self._buffer[self._start : found].decode(errors="replace")
        self._start = found + 2
        return line[:1], line[1:]

    def _fill(self, memory: memoryview) -> None:
        here = min(len(memory), self._end - self._start)
        if here:
            np.copyto(np.frombuffer(memory[:here], np.uint8), np.frombuffer(self._buffer, np.uint8, here, self._start))
            self._start += here
        while here < len(memory):
            here += self._receive(memory[here:])

    def _skip(self, size: int) -> None:
        scratch = memoryview(bytearray(min(size, 1 << 20)))
        while size:
            part = scratch[: min(size, len(scratch))]
            self._fill(part)
            size -= len(part)

    def _end_of_value(self) -> None:
        end = bytearray(2)
        self._fill(memoryview(end))
        if end != b"\r\n":
            raise ConnectionError("the server does not speak redis: a value is longer than its length")


class RedisLine:
    """One connection to a Redis server, made by redis-py. The server gets `name`, if it is not empty, as the name of
    this connection. One thread at a time may use it.
    """

    def __init__(self, kind: Callable[..., Any], settings: dict[str, Any], name: str = "") -> None:
        self._name = name
        self.replies = Replies()
        # Where hiredis is installed, redis-py would take its packer, which copies every value twice.
        packer = PythonRespSerializer(JOINED_BYTES, _encoded)
        self._connection = kind(parser_class=lambda **_: self.replies, protocol=2, command_packer=packer, **settings)
        self._is_open = False
        self.client_id = 0  # the server's number of this connection; 0: not known
        self.server_run = ""  # what names the server from its start to its end; "": not known

    def use(self, deadline: float) -> bool:
        """Prepare the connection for a call that must end by `deadline`, a time of time.monotonic(). Return True if it
        had to connect to the server. Raises redis-py's errors.
        """
        self.replies.deadline = deadline
        if self._is_open and not self.replies.can_read(0):
            return False
        self.close()
        self._connection.connect()
        self._is_open = True
        self.send("PING")  # a server that wants a password says so to any command, but breaks off a long one
        self.answer()
        self.send("CLIENT", "ID")
        number = self.replies.read_response()
        self.client_id = number if isinstance(number, int) else 0
        self.send("INFO", "server")
        self.server_run = fields_of(self.replies.read_response()).get("run_id", "")
        if self._name:
            self.send("CLIENT", "SETNAME", self._name)
            self.replies.read_response()  # not allowed to all users of a server
        return True

    def send(self, *words: str | memoryview) -> None:
        """Send one command, which consists of `words`. Memory among the words is not copied before it goes to the
        socket.
        """
        for piece in self._connection.pack_command(*words):
            self.replies.set_timeout()
            self._connection.send_packed_command([piece], check_health=False)

    def answer(self) -> Reply:
        """Return the next reply of the server. Raises ResponseError if the reply is an error."""
        reply = self.replies.read_response()
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def close(self) -> None:
        self._is_open = False
        self._connection.disconnect()


def fields_of(reply: Reply) -> dict[str, str]:
    """Return the fields of the server's `reply` to INFO by name; an empty dictionary if the reply is an error."""
    text = reply.decode(errors="replace") if isinstance(reply, bytes) else ""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def _encoded(word: str | int | bytes | memoryview) -> bytes | memoryview:
    return word if isinstance(word, bytes | memoryview) else str(word).encode()


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConnectionError(f"the server does not speak redis: {text!r:.60} is no number") from None
