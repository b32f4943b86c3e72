"""Replays: who asked for what it missed, and is sent it as it reads.

A peer is sent the next batch when it has read most of what it was sent before, so a peer that never reads costs
`WINDOW_BYTES` or one batch, and all of them together `MOST_BYTES` and one batch more. One that reads nothing for
`STALL_S` while others wait, or for `GIVEN_UP_S`, is cut. A peer asks for one replay at a time: `WAITING_A_PEER` wait
behind it, more are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import zmq

from kvstored.events.endpoint import Endpoint, Sent
from kvstored.events.stream import Batch, EventStream

WINDOW_BYTES = 1 << 20
WINDOW_BATCHES = 256
MOST_BYTES = 64 << 20
WAITING_A_PEER = 8
REQUESTS_A_TURN = 64
STALL_S, GIVEN_UP_S = 5.0, 60.0
AGAIN_MS = 10  # from one look at whether peers have read to the next
END = (-1).to_bytes(8, "big", signed=True)
Request = tuple[bytes | None, int]


@dataclass
class _Peer:
    descriptor: int
    moved_s: float  # when it last read something
    waiting: deque[Request] = field(default_factory=deque)
    current: Iterator[Batch] | None = None
    sent: Sent = field(default_factory=Sent)

    @property
    def is_idle(self) -> bool:
        return not self.waiting and self.current is None and not len(self.sent)

    @property
    def may_be_sent_more(self) -> bool:
        return self.sent.held_bytes < WINDOW_BYTES and len(self.sent) < WINDOW_BATCHES


class Replays:
    """Answers on `endpoint`, a ROUTER, from `stream`. `now_s` is a monotonic clock."""

    def __init__(self, endpoint: Endpoint, stream: EventStream, now_s: Callable[[], float]) -> None:
        self._endpoint, self._stream, self._now_s = endpoint, stream, now_s
        self._peers: dict[bytes, _Peer] = {}
        endpoint.socket.setsockopt(zmq.ROUTER_MANDATORY, 1)

    @property
    def are_under_way(self) -> bool:
        return bool(self._peers)

    @property
    def held_bytes(self) -> int:
        """Bytes that peers were sent and have not read."""
        return sum(peer.sent.held_bytes for peer in self._peers.values())

    def take(self) -> None:
        """Take in requests that have come: the number of the first batch, after the topic where there are several."""
        for _ in range(REQUESTS_A_TURN):
            try:
                frames = self._endpoint.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            identity, *words = (frame.bytes for frame in frames)
            words = [word for word in words if word]
            if not words or len(words) > 2 or len(words[-1]) != 8:
                continue
            peer = self._peers.get(identity)
            if peer is None:
                peer = self._peers[identity] = _Peer(frames[-1].get(zmq.SRCFD), self._now_s())
            if len(peer.waiting) < WAITING_A_PEER:
                peer.waiting.append((words[0] if len(words) == 2 else None, int.from_bytes(words[-1], "big")))

    def go_on(self) -> None:
        """Send each peer what it has room for, and cut peers that do not read."""
        now_s = self._now_s()
        for peer in self._peers.values():
            if peer.sent.look() or not len(peer.sent):
                peer.moved_s = now_s
        is_full = False
        for identity, peer in list(self._peers.items()):
            while peer.may_be_sent_more and (peer.current is not None or peer.waiting):
                is_full = self.held_bytes >= MOST_BYTES
                if is_full or not self._send_next(identity, peer):
                    break
        for identity, peer in list(self._peers.items()):
            if now_s - peer.moved_s > (STALL_S if is_full else GIVEN_UP_S):
                self._endpoint.cut(peer.descriptor)
                peer.waiting.clear()
                peer.current, peer.moved_s = None, now_s  # once: the descriptor may be another connection's by then
            if peer.is_idle:
                del self._peers[identity]
        if not self._peers:
            self._stream.forget_snapshot()

    def _send_next(self, identity: bytes, peer: _Peer) -> bool:
        """Send one batch, or the end of a replay; whether the peer took it."""
        if peer.current is None:
            name, first = peer.waiting.popleft()
            peer.current = self._stream.replay(first, name)
        batch = next(peer.current, None)
        if batch is None:
            peer.current, frames = None, (identity, b"", b"", END, b"")
        else:
            frames = (identity, b"", batch.topic, batch.number.to_bytes(8, "big"), batch.payload)
        tracker = self._endpoint.send(*frames)
        if tracker is None:
            peer.waiting.clear()
            peer.current = None
            return False
        peer.sent.add(tracker, len(frames[-1]))
        return True
