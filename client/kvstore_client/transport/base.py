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
    """The receiver of the responses that a transport reads, of its alarms, and of its end. A transport calls it from
    its own thread and from `read_until`, with one response at a time.
    """

    @property
    def awaits_late_answers(self) -> bool:
        """True if an answer must be read although no thread waits for it, for example to free its memory or its
        lease.
        """
        ...

    def received(self, response: wire.Response) -> None: ...

    def reading_ended(self) -> None:
        """Note that the thread that read responses has stopped, so that another thread may read."""
        ...

    def alarm(self) -> None:
        """Note that the delay given to `Transport.call_in` is over."""
        ...

    def transport_ended(self, reason: str) -> None:
        """Note that the transport carries no more messages, because of `reason`. It is called once, after the last
        response, and not after `close`.
        """
        ...


class Transport(Protocol):
    codec: MessageCodec

    def start(self, receiver: Receiver) -> None:
        """Begin to carry messages, and hand responses to `receiver`. Call it once, before `send`. Raises RuntimeError
        if no thread can be started.
        """
        ...

    def send(self, request: wire.Request) -> None:
        """Send `request`. It never blocks and never raises: if the stream has ended, the request is dropped, and the
        receiver's `transport_ended` is called.
        """
        ...

    def read_until(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Read responses in the calling thread and hand them to the receiver, until `is_done()` is True or the
        monotonic time `deadline` has come; then return True.

        Return False at once if another thread is reading, which hands over responses until `reading_ended`.
        """
        ...

    def is_read(self) -> bool:
        """Return whether a thread is reading responses now."""
        ...

    def attend(self) -> None:
        """Have a thread of the transport read responses while no caller waits for a response, as long as
        `Receiver.awaits_late_answers` is True.
        """
        ...

    def call_in(self, delay_s: float) -> None:
        """Have the receiver's `alarm` called once, after `delay_s` seconds. A second call before that replaces the
        delay. It never blocks.
        """
        ...

    def close(self) -> None:
        """Close the transport. It may be called from any thread, and a second call does nothing."""
        ...


class MessageCodec:
    """A converter of messages to bytes and back, which counts the bytes and the block payload among them.

    One thread at a time may call `serialize`, and one `parse`.
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
