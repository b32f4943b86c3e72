"""A put in place writes blocks into the slots where they are stored, so the daemon does not copy them.

Blocks that cannot be put in place (no room, another client stores the block, too late) are left to `put`, which uses
staging. The first slots are held ahead for the put (`slot_requests`), or come from a small reservation, which is
granted soon; the daemon finds the other slots while the client writes into the first. Messages are few, since each
takes as long on the daemon's one thread as ten blocks do. No block is sent twice. Invariants: a slot is not written
after it was sent, nor when its reservation is about to end. Slots that were not sent are given back, even if a payload
function raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from kvstore_client.call import Call
from kvstore_client.memory import Bytes
from kvstore_client.put_part import PutPart, SlotRun, StoreMessage
from kvstore_client.slot_requests import Granted, SlotSize
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as wire

MIN_BYTES = 1 << 20  # requesting slots costs a round trip, 0.2 ms: the copy of less takes no longer
FIRST_BYTES, RESERVE_BYTES = 8 << 20, 64 << 20  # of the first reservation; of each one after it
LAST_BYTES = 8 << 20  # what is left of a put, if more, goes in two messages, the last one short: it is waited for
READ_FROM = 4  # answers that are due
LEAST_USABLE_S = 1.0  # time that slots held ahead must have left
_NOT_DECIDED = frozenset({wire.STORE_STATUS_AGAIN, wire.STORE_STATUS_WANTED, wire.STORE_STATUS_ORPHANED})


@dataclass(slots=True)
class _Reserved:
    """Slots that the daemon granted. `places` has the mapped arena and the offset of each slot. `left` is not 0
    if slots were not sent, or the daemon may not have taken them."""

    number: int
    places: Sequence[tuple[Bytes, int]]
    usable_until: float
    left: int
    used: int = 0  # places that were taken to be written


@dataclass(slots=True)
class _Requested:
    """A reservation for `blocks` blocks, requested at the time `at`. `is_ahead`: it was requested before the slots of
    another reservation were written."""

    call: Call
    blocks: int
    at: float
    is_ahead: bool


@dataclass(eq=False)
class InPlacePut(PutPart):
    """The part of a put that writes blocks straight into the daemon's slots, without a copy in staging memory. Call
    `run` once. `_believed` has the blocks that the lookup index showed as stored; a block is removed from it if the
    daemon wants its bytes nevertheless.
    """

    _undecided: list[int] = field(default_factory=list, init=False)
    _requested: _Requested | None = field(default=None, init=False)
    _hold_ahead: Callable[[], None] | None = field(default=None, init=False)  # slots for the next put
    _taken: int = field(default=0, init=False)  # blocks that were written and sent
    _reserved: dict[int, _Reserved] = field(default_factory=dict, init=False)  # by number
    _current: _Reserved | None = field(default=None, init=False)

    run_bytes: ClassVar = 16 << 20  # the daemon checksums a message of these while the next one is written
    send_every_s: ClassVar = 0.003

    def __post_init__(self) -> None:
        super().__post_init__()
        self._slots, self._size = self._daemon.slots, SlotSize(self._order.group_id, self._order.payload_bytes)

    def run(self) -> list[int]:
        """Put the blocks into slots. Return in order the numbers of the blocks that still have to be put, through
        staging memory. Raises the errors of payload functions, and KVStoreError if the daemon finds a request wrong.
        """
        try:
            ahead = self._take_ahead()
            if ahead is None:
                self._requested = self._request(FIRST_BYTES)
            else:
                self._requested = self._request(RESERVE_BYTES, behind=ahead.slots)
                if (reserved := self._mapped(ahead)) is not None:
                    self._write_into(reserved)
            while (requested := self._requested) is not None:
                self._requested = self._request(RESERVE_BYTES, behind=requested.blocks)
                reserved, left = self._granted(requested), len(self._todo)
                if reserved is not None:
                    self._write_into(reserved)
                    if len(self._todo) == left:
                        break
                elif requested.is_ahead:
                    self._collect_all()  # a client may hold only so much, and stored blocks do not count
                else:
                    break
                if self._requested is None:
                    self._requested = self._request(RESERVE_BYTES)  # fewer were granted than requested
            if self._is_worth_it(self._taken):  # the daemon grants them while it checksums the last message
                self._hold_ahead = self._slots.request_ahead(self._size, self._taken)
            self._collect_all()
        finally:
            self._leave()
        return sorted([*self._undecided, *self._todo])

    # Slots

    def _is_worth_it(self, blocks: int) -> bool:
        return blocks * self._order.payload_bytes >= MIN_BYTES

    def _take_ahead(self) -> Granted | None:
        if not self._is_worth_it(len(self._todo) - len(self._believed)):
            return None
        return self._slots.take_ahead(self._size, LEAST_USABLE_S)

    def _request(self, most_bytes: int, behind: int = 0) -> _Requested | None:
        """Request slots for the next blocks, after skipping `behind` of them; return None if too little is left to
        write."""
        order, now = self._order, self._clock()
        most = max(1, min(most_bytes // self._size.nbytes, self._daemon.max_keys))
        ahead = [block for block in self._todo if block not in self._believed][behind : behind + most]
        if not ahead or (not behind and not self._is_worth_it(len(ahead))) or now >= self._deadline:
            return None
        parent = order.chain.parent_of(order.first_block + ahead[0])
        call = self._slots.request(self._size, len(ahead), self._deadline - now, parent)
        return _Requested(call, len(ahead), now, behind > 0)

    def _granted(self, requested: _Requested) -> _Reserved | None:
        """Return the granted slots, mapped; None if the daemon granted none."""
        reply = self._answer(requested.call)
        granted = None if reply is None else self._slots.granted(self._size, reply, requested.at)
        return None if granted is None else self._mapped(granted)

    def _mapped(self, granted: Granted) -> _Reserved | None:
        """Return the slots of `granted`, mapped; None if an arena cannot be mapped."""
        reply, slot_bytes = granted.reply, self._size.nbytes
        places: list[tuple[Bytes, int]] = []
        reserved = _Reserved(reply.reservation, places, granted.usable_until, granted.slots)
        self._reserved[reserved.number] = reserved
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
        for message in self._sent:  # a payload function raised: the daemon decides what was sent
            if message.call is not None:
                message.call.abandon()
            self._unanswered(message)
            self._undecided += message.blocks
        self._sent.clear()
        for reserved in self._reserved.values():
            if reserved.left:
                self._slots.give_back(reserved.number)
        if self._hold_ahead is not None:
            self._hold_ahead()

    # Writing

    def _write_into(self, reserved: _Reserved) -> None:
        """Fill the slots and send them: as many in a message as are written within `send_every_s`."""
        self._current, self._write_until = reserved, min(self._deadline, reserved.usable_until)
        while self._todo and self._write():
            message = self._unsent
            message.reservation = reserved.number
            reserved.left -= message.written
            self._taken += message.written
            self._send()

    def _room_in(self, message: StoreMessage) -> int:
        left_bytes = (message.written + len(self._todo)) * self._slot_bytes
        most_bytes = min(self.run_bytes, left_bytes if left_bytes <= LAST_BYTES else left_bytes * 2 // 3)
        return max(most_bytes // self._slot_bytes, 1) - message.written

    def _take_run(self, most: int) -> SlotRun | None:
        reserved = self._current
        if reserved is None or reserved.used == len(reserved.places) or self._clock() >= self._write_until:
            return None
        first, size, count = reserved.used, self._slot_bytes, 1
        memory, offset = reserved.places[first]
        for arena, next_offset in islice(reserved.places, first + 1, first + most):
            if arena is not memory or next_offset != offset + count * size:
                break
            count += 1
        reserved.used += count
        return SlotRun(memory, offset, count, first + 1, 1)

    # Answers

    def _collect_answered(self) -> None:
        """Process the answers that have arrived, once several are due: there is time while the last one is awaited, and
        no slot is written again before."""
        if len(self._sent) >= READ_FROM:
            super()._collect_answered()

    def _collect_all(self) -> None:
        while self._sent:
            self._collect()

    def _unanswered(self, message: StoreMessage) -> None:
        """Note that the daemon may have taken no slot: the message may come after the reservation's end."""
        self._reserved[message.reservation].left += 1

    def _take(self, message: StoreMessage, call: Call, response: wire.Response) -> None:
        if response.HasField("error") or set(response.store.statuses) == {wire.STORE_STATUS_AGAIN}:
            self._unanswered(message)
        answer = call.judge(response)
        if isinstance(answer, str):
            self._undecided += message.blocks
            return
        statuses = answer.store.statuses
        again = [position for position, status in enumerate(statuses) if status in _NOT_DECIDED]
        undecided = [message.blocks[position] for position in again]
        self._undecided += undecided
        self._believed.difference_update(undecided)
        self._enter(message, call, answer, again)
