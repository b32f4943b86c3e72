"""The KV events of one node, applied to its index: live ones as they come, lost ones by asking for them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from deploy.fleet.prefix_index import PrefixIndex

_END = b"\xff" * 8


class Subscriber:
    """`index` is up to date with the node, within milliseconds, while `follow` runs."""

    def __init__(self, context: zmq.asyncio.Context, events_url: str, replay_url: str) -> None:
        self.index = PrefixIndex()
        self._next: dict[bytes, int] = {}  # number that a topic's next batch has
        self._live = context.socket(zmq.SUB)
        self._live.connect(events_url)
        self._live.subscribe(b"")
        self._asking = context.socket(zmq.DEALER)
        self._asking.connect(replay_url)

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            topic, number, batch = await self._live.recv_multipart()
            at = int.from_bytes(number, "big")
            if at != self._next.get(topic, 0) and at != 0:  # lost, or from before we came
                await self._catch_up(topic)
            elif at == 0 or at >= self._next.get(topic, 0):
                self._apply(topic, at, batch)

    async def _catch_up(self, topic: bytes) -> None:
        """Ask for all batches since the last one, and take them; the answer may begin with a snapshot."""
        await self._asking.send_multipart((b"", topic, self._next.get(topic, 0).to_bytes(8, "big")))
        async with asyncio.timeout(10):
            while True:
                _, name, number, batch = await self._asking.recv_multipart()
                if number == _END:
                    return
                self._apply(name, int.from_bytes(number, "big"), batch)

    def _apply(self, topic: bytes, number: int, batch: bytes) -> None:
        decoded: Any = msgspec.msgpack.decode(batch)
        for event in decoded[1]:
            self.index.apply(event)
        self._next[topic] = number + 1
