"""A direct stream: messages, each after its length, on a socket that the handshake handed over.

The calling thread writes its request, and reads the stream while it waits, so a call wakes no other thread here. That
matters on a busy node, where a hand-over between two threads of one process takes as long as getting a core. An
attendant thread does the rest: it reads late answers, writes the rest of a request that the socket had no room for (of
a daemon that is stopped or overloaded), keeps the alarm, and notices the end.

Invariants: one thread reads at a time; the attendant does not poll for data while another thread reads. A thread that
is interrupted while it reads ends the stream, because part of a message may be lost; the next stream begins with whole
messages. A forked child neither writes nor reads: the stream is its parent's.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from kvstore_client.transport.base import MAX_MESSAGE_BYTES, MessageCodec, Receiver
from kvstore_proto.framing import Frames, FrameTooLarge, frame
from kvstore_proto.v1 import kvstore_pb2 as wire

RECEIVE_BYTES = 256 * 1024
_ENDED = "the daemon ended the stream"
_HANGUP = select.POLLRDHUP | select.POLLHUP | select.POLLERR | select.POLLNVAL


class DirectTransport:
    """A transport of a client's messages over the connected stream socket `connected`, which it owns and closes. Each
    message is sent after its length. It implements `Transport`. Raises OSError if the process has no file descriptor
    left.
    """

    def __init__(self, connected: socket.socket) -> None:
        try:
            self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError:
            connected.close()
            raise
        connected.setblocking(False)
        self.codec = MessageCodec()
        self._socket = connected
        self._frames = Frames(MAX_MESSAGE_BYTES)
        self._reading = threading.Lock()
        self._input = select.poll()  # used under `_reading`
        self._input.register(connected, select.POLLIN)
        self._lock = threading.Lock()  # of what is written, and of the descriptors' end
        self._unsent: deque[bytes] = deque()
        self._alarm_at: float | None = None
        self._is_closed = False  # by us
        self._is_over = False  # nothing more arrives
        self._pid = os.getpid()

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        try:
            threading.Thread(target=self._attend, name="kvstore-stream", daemon=True).start()
        except RuntimeError:
            self._close_descriptors()
            raise

    def send(self, request: wire.Request) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            if self._is_closed or self._is_over:
                return
            data = frame(self.codec.serialize(request))
            if not self._unsent:
                data = data[self._write(data) :]
            if data:
                self._unsent.append(data)
                self._wake()

    def read_until(self, is_done: Callable[[], bool], deadline: float) -> bool:
        if os.getpid() != self._pid:
            return True
        if not self._reading.acquire(blocking=False):
            return False
        try:
            while not (is_done() or self._is_over or self._is_closed):
                left_s = deadline - time.monotonic()
                if self._input.poll(max(left_s, 0.0) * 1000):
                    self._receive()
                if left_s <= 0:
                    break
        finally:
            self._stop_reading()
        return True

    def is_read(self) -> bool:
        return self._reading.locked()

    def attend(self) -> None:
        with self._lock:
            self._wake()

    def call_in(self, delay_s: float) -> None:
        with self._lock:
            self._alarm_at = time.monotonic() + delay_s
            self._wake()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the reader
            self._wake()

    # Writing

    def _write(self, data: bytes) -> int:
        """Write as much as the socket takes now, and return its bytes. After an error, all counts as written: the
        reader will find the end.
        """
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0
        except OSError:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # regardless of the error: nothing may follow half a request
            return len(data)

    def _flush(self) -> None:
        with self._lock:
            while self._unsent:
                left = self._unsent[0]
                written = self._write(left)
                if written < len(left):
                    self._unsent[0] = left[written:]
                    return
                self._unsent.popleft()

    # Reading

    def _stop_reading(self) -> None:
        """Let another thread read. The caller has acquired `_reading`."""
        self._reading.release()
        self._receiver.reading_ended()
        if self._receiver.awaits_late_answers:
            self.attend()

    def _receive(self) -> bool:
        """Hand over arrived responses; return False if there were none. The caller holds `_reading`."""
        try:
            try:
                data, why = self._socket.recv(RECEIVE_BYTES), _ENDED
            except BlockingIOError:
                return False
            except OSError as error:
                data, why = b"", f"{_ENDED}: {error.strerror}"
            if not data:
                self._end(why)
                return True
            self._frames.feed(data)
            while (message := self._frames.take()) is not None:
                self._receiver.received(self.codec.parse(message))
        except (FrameTooLarge, DecodeError) as error:
            self._end(f"the stream cannot be read: {error}")
        except BaseException:
            self._end("reading the stream was interrupted")
            raise
        return True

    def _end(self, reason: str) -> None:
        with self._lock:
            was_over, self._is_over = self._is_over or self._is_closed, True
            self._wake()
        if not was_over:
            self._receiver.transport_ended(reason)

    # The attendant

    def _attend(self) -> None:
        try:
            self._carry()
        finally:
            with self._reading:
                self._end("the stream's attendant failed")  # or nothing new
                self._close_descriptors()
            self._receiver.reading_ended()

    def _close_descriptors(self) -> None:
        with self._lock:
            os.close(self._wake_fd)
            self._wake_fd = -1
            self._socket.close()

    def _carry(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        while not (self._is_closed or self._is_over):
            attends = self._receiver.awaits_late_answers and not self._reading.locked()
            poll.register(self._socket, self._events(attends))
            ready = dict(poll.poll(self._patience_ms()))
            if self._wake_fd in ready:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake_fd)
            events = ready.get(self._socket.fileno(), 0)
            if events & select.POLLOUT:
                self._flush()
            may_read = events & (select.POLLIN | _HANGUP) and self._reading.acquire(blocking=bool(events & _HANGUP))
            if may_read:
                try:
                    while not self._is_over and self._receive():
                        pass
                finally:
                    self._stop_reading()
            if self._is_alarm_due():
                self._receiver.alarm()

    def _is_alarm_due(self) -> bool:
        with self._lock:
            if self._alarm_at is None or time.monotonic() < self._alarm_at:
                return False
            self._alarm_at = None
            return True

    def _events(self, attends: bool) -> int:
        """Return which events wake the attendant, apart from the end, which always does."""
        return select.POLLRDHUP | (select.POLLIN if attends else 0) | (select.POLLOUT if self._unsent else 0)

    def _patience_ms(self) -> float | None:
        alarm_at = self._alarm_at
        return None if alarm_at is None else max(alarm_at - time.monotonic(), 0.0) * 1000

    def _wake(self) -> None:
        """Wake the attendant. The caller holds the lock."""
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
