"""The contract of a transport, and the common treatment of messages: bytes and back, counted.

A transport carries requests to the daemon in the order in which they were sent, and hands each response to its
receiver, one at a time. It does not judge, retry or reconnect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from kvstore_proto.v1 import kvstore_pb2 as wire

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024


class Receiver(Protocol):
    """The receiver of a transport's calls: from a thread of its own, and from `read_until`. Never with two responses at
    a time.
    """

    @property
    def awaits_late_answers(self) -> bool:
        """True if an answer must be read though no thread waits for it."""
        ...

    def received(self, response: wire.Response) -> None: ...

    def reading_ended(self) -> None:
        """Note that the reading thread has stopped: another one may read."""
        ...

    def alarm(self) -> None:
        """Note that the delay given to `call_in` is over."""
        ...

    def transport_ended(self, reason: str) -> None:
        """Note, once, after the last response, that nothing is carried any more. Not called after `close`."""
        ...


class Transport(Protocol):
    codec: MessageCodec

    def start(self, receiver: Receiver) -> None:
        """Begin to carry messages. Call it once, before anything is sent. Raises RuntimeError if there is no thread for
        it.
        """
        ...

    def send(self, request: wire.Request) -> None:
        """Send a request. Never blocks and never raises: a request that cannot be carried any more is dropped, and
        `transport_ended` follows.
        """
        ...

    def read_until(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Hand over responses, in the calling thread, until `is_done` or the monotonic `deadline`.

        Return False at once if another thread is reading, which hands over responses until `reading_ended`.
        """
        ...

    def is_read(self) -> bool:
        """Return whether some thread is reading now."""
        ...

    def attend(self) -> None:
        """Hand over responses that no thread waits for, too: see `Receiver.awaits_late_answers`."""
        ...

    def call_in(self, delay_s: float) -> None:
        """Call `alarm` once, after a delay. A second call before that replaces the delay. Never blocks."""
        ...

    def close(self) -> None:
        """Close the transport, from any thread. Idempotent."""
        ...


class MessageCodec:
    """A codec of messages to bytes and back. It counts the bytes, and the opaque payload among them.

    One thread at a time serializes, and one at a time parses.
    """

    def __init__(self) -> None:
        self._sent_bytes = self._received_bytes = 0
        self._sent_payload_bytes = self._received_payload_bytes = 0

    @property
    def message_bytes(self) -> int:
        return self._sent_bytes + self._received_bytes

    @property
    def payload_bytes(self) -> int:
        return self._sent_payload_bytes + self._received_payload_bytes

    def serialize(self, request: wire.Request) -> bytes:
        data: bytes = request.SerializeToString()
        self._sent_bytes += len(data)
        if request.HasField("ping"):
            self._sent_payload_bytes += len(request.ping.payload)
        return data

    def parse(self, data: bytes) -> wire.Response:
        self._received_bytes += len(data)
        response: wire.Response = wire.Response.FromString(data)
        if response.HasField("ping"):
            self._received_payload_bytes += len(response.ping.payload)
        return response
