"""Put in place: blocks are written into the slots where they are stored, so that they are not copied again.

The module makes stored blocks of granted slots. Blocks that cannot be put this way (no room, another client stores the
block, too late) are left to `put`, which goes through staging. The first slots are held ahead for it (`slot_requests`),
or a small reservation, which is granted soon; the daemon finds the other slots while the first are written. The last
message is small too, so that little is left to do after it. No block is sent twice. Invariants: a slot is not written
after it was sent, nor when its reservation is about to end; slots that were not sent are given back, even if a payload
function raises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore_client.call import Call
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.memory import Bytes
from kvstore_client.payload import PayloadWriter, write_tokens
from kvstore_client.receipt import PutOrder, PutReceipt
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.slot_requests import Granted, SlotSize
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as wire

MIN_BYTES = 1 << 20  # requesting slots costs a round trip, 0.2 ms: the copy of less takes no longer
FIRST_BYTES, RESERVE_BYTES = 8 << 20, 64 << 20  # of the first reservation; of each one after it
SEND_EVERY_S = 0.001
LAST_BYTES = 1 << 20  # of the last message: the daemon checksums so much without a hand-over to a thread
LEAST_USABLE_S = 1.0  # time that slots held ahead must have left
_NOT_DECIDED = frozenset({wire.STORE_STATUS_AGAIN, wire.STORE_STATUS_WANTED, wire.STORE_STATUS_ORPHANED})


@dataclass(slots=True)
class _Reserved:
    """Slots that the daemon granted: each in a mapped arena, at an offset. `left` were not sent, or not taken."""

    number: int
    places: Sequence[tuple[Bytes, int]]
    usable_until: float
    left: int


@dataclass(slots=True)
class _Requested:
    """A reservation for some blocks, requested at `at`; `is_ahead`: before the slots of another one were written."""

    call: Call
    blocks: int
    at: float
    is_ahead: bool


class InPlacePut:
    """One put; use once. `believed`: blocks that are not written, because they seem to be stored; one that the daemon
    wants after all is taken out.
    """

    def __init__(
        self,
        daemon: DaemonSession,
        order: PutOrder,
        receipt: PutReceipt,
        believed: set[int],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon, self._order = daemon, order
        self._receipt, self._believed = receipt, believed
        self._deadline, self._clock = deadline, clock
        self._slots, self._size = daemon.slots, SlotSize(order.group_id, order.payload_bytes)
        self._todo = deque(range(len(order.payloads)))
        self._undecided: list[int] = []
        self._sent: deque[tuple[Call, list[int], _Reserved]] = deque()
        self._requested: _Requested | None = None
        self._written = 0  # blocks
        self._reserved: list[_Reserved] = []

    def run(self) -> list[int]:
        """Put the blocks; return the undecided ones, in order. Raises the errors of payload functions, and KVStoreError
        if the daemon finds a request wrong.
        """
        try:
            ahead = self._take_ahead()
            if ahead is None:
                self._requested = self._request(FIRST_BYTES)
            else:
                self._requested = self._request(RESERVE_BYTES, behind=ahead.slots)
                if (reserved := self._mapped(ahead)) is not None:
                    self._write(reserved)
            while (requested := self._requested) is not None:
                self._requested = self._request(RESERVE_BYTES, behind=requested.blocks)
                reserved, left = self._granted(requested), len(self._todo)
                if reserved is not None:
                    self._write(reserved)
                    if len(self._todo) == left:
                        break
                elif requested.is_ahead:
                    self._collect_all()  # a client may hold only so much, and stored blocks do not count
                else:
                    break
                if self._requested is None:
                    self._requested = self._request(RESERVE_BYTES)  # fewer were granted than requested
            self._collect_all()
        finally:
            self._leave()
        if self._is_worth_it(self._written):
            self._slots.request_ahead(self._size, self._written)
        return sorted([*self._undecided, *self._todo])

    # Slots

    def _is_worth_it(self, blocks: int) -> bool:
        return blocks * self._order.payload_bytes >= MIN_BYTES

    def _take_ahead(self) -> Granted | None:
        if not self._is_worth_it(len(self._todo) - len(self._believed)):
            return None
        return self._slots.take_ahead(self._size, LEAST_USABLE_S)

    def _request(self, most_bytes: int, behind: int = 0) -> _Requested | None:
        """Request slots for the next blocks, after the next `behind`; return None if too little is left to write."""
        order, now = self._order, self._clock()
        most = max(1, min(most_bytes // self._size.nbytes, self._daemon.max_keys))
        ahead = [block for block in self._todo if block not in self._believed][behind : behind + most]
        if not ahead or (not behind and not self._is_worth_it(len(ahead))) or now >= self._deadline:
            return None
        parent = order.chain.parent_of(order.first_block + ahead[0])
        call = self._slots.request(self._size, len(ahead), self._deadline - now, parent)
        return _Requested(call, len(ahead), now, behind > 0)

    def _granted(self, requested: _Requested) -> _Reserved | None:
        """Return the slots, mapped; None if none are granted."""
        reply = self._answer(requested.call)
        granted = None if reply is None else self._slots.granted(self._size, reply, requested.at)
        return None if granted is None else self._mapped(granted)

    def _mapped(self, granted: Granted) -> _Reserved | None:
        """Return the slots, mapped; None if an arena cannot be mapped."""
        reply, slot_bytes = granted.reply, self._size.nbytes
        places: list[tuple[Bytes, int]] = []
        reserved = _Reserved(reply.reservation, places, granted.usable_until, granted.slots)
        self._reserved.append(reserved)
        for arena_id, offset in zip(reply.arena_ids, reply.offsets, strict=True):
            arena = self._daemon.writable.arena(arena_id, self._daemon.deadline_s)
            if arena is None or offset + slot_bytes > len(arena):
                return None
            places.append((arena, offset))
        for arena_id in set(reply.arena_ids):
            offsets = [at for which, at in zip(reply.arena_ids, reply.offsets, strict=True) if which == arena_id]
            self._daemon.writable.enter(arena_id, offsets, slot_bytes)
        return reserved

    def _answer(self, call: Call) -> wire.ReserveSlotsReply | None:
        response = call.wait(min(self._daemon.deadline_s, self._deadline - self._clock()))
        if response is None:  # it is making room: staging serves meanwhile
            self._slots.abandon(call)
            return None
        try:
            answer = call.judge(response)
        except KVStoreError as error:
            if error.kind is not ErrorKind.FORBIDDEN:
                raise
            self._daemon.writable.refused()  # the setting was changed since we connected
            return None
        return None if isinstance(answer, str) else answer.reserve_slots

    def _leave(self) -> None:
        """Give unused slots back."""
        if self._requested is not None:
            self._slots.abandon(self._requested.call)
        for call, blocks, _ in self._sent:  # a payload function raised: the daemon decides what was sent
            call.abandon()
            self._undecided += blocks
        self._sent.clear()
        for reserved in self._reserved:
            if reserved.left:
                self._slots.give_back(reserved.number)

    # Writing

    def _write(self, reserved: _Reserved) -> None:
        """Fill the slots and send them, as many at a time as are written in a millisecond, and few at the end."""
        with PayloadWriter(self._order.payload_bytes) as writer:
            self._write_with(writer, reserved)

    def _write_with(self, writer: PayloadWriter, reserved: _Reserved) -> None:
        order, until = self._order, min(self._deadline, reserved.usable_until)
        blocks: list[int] = []
        pages: list[int] = []
        send_at = self._clock() + SEND_EVERY_S
        self._write_tokens(reserved)
        place, last_blocks = 0, max(1, LAST_BYTES // order.payload_bytes)
        while self._todo and len(blocks) < self._daemon.max_keys:
            block = self._todo[0]
            if block in self._believed:
                page = 0
            elif place == len(reserved.places) or self._clock() >= until:
                break
            else:
                arena, offset = reserved.places[place]
                writer.write(arena, offset, order.payloads[block])
                place += 1
                page = place
            blocks.append(self._todo.popleft())
            pages.append(page)
            is_nearly_done = len(self._todo) == last_blocks and len(blocks) > last_blocks
            if is_nearly_done or self._clock() >= send_at:
                writer.settle()
                self._send(reserved, blocks, pages)
                blocks, pages = [], []
                self._collect_answered()
                send_at = self._clock() + SEND_EVERY_S
        if blocks:
            writer.settle()
            self._send(reserved, blocks, pages)

    def _write_tokens(self, reserved: _Reserved) -> None:
        """Write the token ids of all blocks of the slots, run by run."""
        order, size, first = self._order, self._size.nbytes, 0
        ahead = [block for block in self._todo if block not in self._believed][: len(reserved.places)]
        for length in self._runs(ahead, reserved.places):
            arena, offset = reserved.places[first]
            tokens = order.chain.tokens_of_run(order.first_block + ahead[first], length)
            write_tokens(arena[offset : offset + length * size], length, tokens)
            first += length

    def _runs(self, blocks: Sequence[int], places: Sequence[tuple[Bytes, int]]) -> Iterator[int]:
        """Yield the lengths of the runs of consecutive blocks in consecutive slots."""
        length = 1
        for at in range(1, len(blocks)):
            (before, offset), (arena, next_offset) = places[at - 1], places[at]
            if blocks[at] == blocks[at - 1] + 1 and arena is before and next_offset == offset + self._size.nbytes:
                length += 1
            else:
                yield length
                length = 1
        if blocks:
            yield length

    def _send(self, reserved: _Reserved, blocks: list[int], pages: list[int]) -> None:
        body = self._order.store(blocks, pages, reservation=reserved.number)
        written = sum(page > 0 for page in pages)
        reserved.left -= written
        self._written += written
        call = self._daemon.begin(wire.Request(store=body), self._deadline - self._clock())
        self._sent.append((call, blocks, reserved))

    # Answers

    def _collect_all(self) -> None:
        while self._sent:
            self._collect()

    def _collect_answered(self) -> None:
        while self._sent and self._sent[0][0].is_answered():
            self._collect()

    def _collect(self) -> None:
        """Wait for the oldest message's answer."""
        call, blocks, reserved = self._sent.popleft()
        response = call.wait(self._deadline - self._clock())
        if response is None:
            call.expire()
            self._receipt.reason = REASON_DEADLINE
            return
        if response.HasField("error"):
            reserved.left += 1  # it may have taken nothing
        answer = call.judge(response)
        if isinstance(answer, str):
            self._undecided += blocks
            return
        statuses = answer.store.statuses
        decided = [-1 if status in _NOT_DECIDED else block for block, status in zip(blocks, statuses, strict=False)]
        undecided = [block for block, kept in zip(blocks, decided, strict=False) if kept < 0]
        self._undecided += undecided
        self._believed.difference_update(undecided)
        self._receipt.record(call, answer, decided)
        if wire.STORE_STATUS_PRESENT in statuses:
            self._daemon.index.get(may_wait=False)  # so that the next put knows what is present
