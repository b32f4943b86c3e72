"""A put part writes some blocks of one put into memory of the daemon, names them in Store messages, and enters the
answers into the receipt.

The module owns the pipeline: the blocks that are still to write, and the messages that were sent and are not answered,
oldest first. The subclasses own the memory for the bytes: staging memory (`put`), or slots of the daemon (`in_place`).
Blocks that are written within a millisecond (`send_every_s`), or are 24 MiB together (`run_bytes`), go in one message,
because each message costs the daemon about as much time as copying 8 MiB. Other blocks are sent in several messages, so
that the daemon copies while the client writes. Blocks that the lookup index shows are not written: only their keys are
sent, and the daemon answers whether it wants them after all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from kvstore_client.call import Call, Late
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.memory import Bytes
from kvstore_client.payload import PayloadWriter, write_tokens
from kvstore_client.receipt import PutOrder, PutReceipt
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.staging import Extent, Use
from kvstore_proto.arena import slot_bytes
from kvstore_proto.v1 import kvstore_pb2 as wire


@dataclass(slots=True, eq=False)
class StoreMessage:
    """One request of a put that names blocks to store. `blocks` are their indices in the receipt. `pages` are the
    numbers of the places where their bytes were written: pages of the staging memory lent as `loan`, or slots of
    `reservation`; 0 stands for a block that was not written, and `written` counts the others. `extents` has the extent
    of staging memory of each block. `call` is set when the request is sent.
    """

    loan: int = 0
    reservation: int = 0
    blocks: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    written: int = 0
    extents: list[Extent | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    call: Call | None = None

    def add(self, blocks: Sequence[int], pages: Iterable[int], extent: Extent | None = None) -> None:
        self.blocks += blocks
        self.pages += (places := list(pages))
        self.written += len(places) - places.count(0)
        self.extents += [extent] * len(blocks)
        if extent is not None:
            self.use.extents += [extent] * len(blocks)


class SlotRun(NamedTuple):
    """Consecutive slots in `memory`, from `offset` on. The first slot has the page number `page`; each next slot's
    number is `page_step` higher.
    """

    memory: Bytes
    offset: int
    slots: int
    page: int
    page_step: int
    extent: Extent | None = None


@dataclass(eq=False)
class PutPart(ABC):
    """The base of the two ways to put blocks: through staging memory, and in place. It writes blocks, sends their keys,
    and enters the daemon's answers into the receipt. Use it once, in the caller's thread. The blocks in `_believed`
    seem to be stored: they are named without being written until the daemon wants their bytes. A message is sent once
    its blocks have `run_bytes` bytes, or `send_every_s` after the first was begun.
    """

    _daemon: DaemonSession
    _order: PutOrder
    _receipt: PutReceipt
    _todo: deque[int]
    _believed: set[int]
    _deadline: float
    _clock: Callable[[], float]
    _written: dict[int, tuple[int, Extent]] = field(default_factory=dict, init=False)  # to be sent again, and its page
    _unsent: StoreMessage = field(default_factory=StoreMessage, init=False)
    _sent: deque[StoreMessage] = field(default_factory=deque, init=False)

    run_bytes: ClassVar = 24 << 20
    send_every_s: ClassVar = 0.001

    def __post_init__(self) -> None:
        self._slot_bytes = slot_bytes(self._order.payload_bytes)
        self._write_until = self._deadline

    # Writing

    def _write(self) -> bool:
        """Fill the next message while there is room and time. Return False when the message has no block."""
        self._collect_answered()
        message, sent_at = self._unsent, self._clock() + self.send_every_s
        with PayloadWriter(self._order.payload_bytes) as writer:
            while self._todo and len(message.blocks) < self._daemon.max_keys:
                block = self._todo[0]
                if self._clock() >= self._deadline:
                    self._late()
                    break
                if block in self._believed:
                    message.add([self._todo.popleft()], [0])
                elif block in self._written:
                    page, extent = self._written.pop(block)
                    message.add([self._todo.popleft()], [page], extent)
                elif not self._write_run(writer, message) or self._clock() >= sent_at or self._room_in(message) <= 0:
                    break
        return bool(message.blocks)

    def _write_run(self, writer: PayloadWriter, message: StoreMessage) -> bool:
        """Write the next blocks into consecutive slots. Return False when there is no room for one block, or no time
        for all of them."""
        run = self._take_run(self._run_length(message))
        if run is None:
            return False
        order, size, first, written = self._order, self._slot_bytes, self._todo[0], 0
        end = run.offset + run.slots * size
        try:
            tokens = order.chain.tokens_of_run(order.first_block + first, run.slots)
            write_tokens(run.memory[run.offset : end], run.slots, tokens)
            for offset in range(run.offset, end, size):
                if self._clock() >= self._write_until:
                    return False
                writer.write(run.memory, offset, order.payloads[first + written])
                written += 1
        finally:
            blocks = [self._todo.popleft() for _ in range(written)]
            message.add(blocks, range(run.page, run.page + written * run.page_step, run.page_step), run.extent)
            self._leave_unwritten(run, run.slots - written)
        return True

    def _room_in(self, message: StoreMessage) -> int:
        """Return how many blocks may still be written for `message`."""
        return max(self.run_bytes // self._slot_bytes, 1) - message.written

    def _run_length(self, message: StoreMessage) -> int:
        """Return how many of the next blocks are consecutive and have to be written."""
        most = min(max(self._room_in(message), 1), self._daemon.max_keys - len(message.blocks))
        first, length = self._todo[0], 0
        for block in self._todo:
            if length == most or block != first + length or block in self._believed or block in self._written:
                break
            length += 1
        return length

    @abstractmethod
    def _take_run(self, most: int) -> SlotRun | None:
        """Take at most `most` consecutive slots; return None when there is none."""

    def _leave_unwritten(self, run: SlotRun, slots: int) -> None:
        """Take back the last `slots` slots of `run`."""
        return

    def _late(self) -> None:
        """Handle the end of the time, with some blocks not written."""
        return

    def _send(self) -> None:
        message, self._unsent = self._unsent, StoreMessage()
        body = self._order.store(message.blocks, message.pages, loan=message.loan, reservation=message.reservation)
        self._sent.append(message)  # first: from here on its bytes are the daemon's until it answers
        message.call = self._daemon.begin(wire.Request(store=body), self._deadline - self._clock())

    # Answers

    def _collect_answered(self) -> None:
        """Process the answers that have arrived, without waiting. The bytes of answered messages can be used again."""
        while self._sent and (call := self._sent[0].call) is not None and (response := call.wait(0.0)) is not None:
            self._take(self._sent.popleft(), call, response)

    def _collect(self) -> None:
        """Wait for the answer to the oldest message, and process it."""
        message = self._sent[0]
        assert message.call is not None
        response = message.call.wait(self._deadline - self._clock())
        self._sent.popleft()
        if response is None:
            message.call.expire(self._unanswered(message))
            self._receipt.reason = REASON_DEADLINE
        else:
            self._take(message, message.call, response)

    @abstractmethod
    def _take(self, message: StoreMessage, call: Call, response: wire.Response) -> None:
        """Process the answer to `message`. Raises KVStoreError when the daemon finds the message wrong."""

    def _unanswered(self, message: StoreMessage) -> Late | None:
        """Return the receiver of an answer to `message` that comes after the thread has stopped waiting; None when
        there is none."""
        return None

    def _enter(self, message: StoreMessage, call: Call, answer: wire.Response, again: Collection[int]) -> None:
        """Enter an answer into the receipt, except for the positions `again`, which another request decides."""
        decided = [-1 if position in again else block for position, block in enumerate(message.blocks)]
        self._receipt.record(call, answer, decided)
        if wire.STORE_STATUS_PRESENT in answer.store.statuses:  # asked at the first answer, it is there at the end
            self._daemon.index.get(may_wait=False)
