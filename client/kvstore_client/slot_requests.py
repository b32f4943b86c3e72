"""Slots for puts in place: requested from the daemon, given back, and held ahead for the next put.

A put waits a round trip for its first slots, and that is a sixth of the time of a put of 32 MiB. So when a put has
sent its blocks, as many slots as it took are requested for the next one, which begins to write at once if it has blocks
of equal size. Slots that no put takes within `IDLE_S` are given back.

The module owns the slots that are held ahead. It never writes to one. Invariant: granted slots are with one put, held
ahead, or given back, however late the answer arrives.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore_client.call import Call
from kvstore_proto.arena import slot_bytes
from kvstore_proto.v1 import kvstore_pb2 as wire

IDLE_S: Final = 5.0
AHEAD_BYTES: Final = 36 << 20  # held ahead at most: 32 MiB and headers
USABLE_SHARE = 0.9  # of a reservation's time
_AHEAD_DEADLINE_S = 1.0
_AHEAD_WAIT_S = 0.005  # of a put that follows at once: an answer to a request of its own would come later
_CLOSE_WAIT_S = 0.1
_LATE_S = 1.0  # a look so late was lost with its stream

Begin = Callable[[wire.Request, float], Call]
CallLater = Callable[[float, Callable[[], None]], None]


@dataclass(frozen=True, slots=True)
class SlotSize:
    """The size of slots (places for one block in an arena): for payloads of `payload_bytes` bytes of the layer group
    `group_id`.
    """

    group_id: int
    payload_bytes: int

    @property
    def nbytes(self) -> int:
        return slot_bytes(self.payload_bytes)


@dataclass(slots=True)
class Granted:
    """Slots of one size that the daemon reserved for this client. The client may write to them until `usable_until`, in
    seconds of its clock. `reply` is the daemon's answer, which names the slots.
    """

    size: SlotSize
    reply: wire.ReserveSlotsReply
    usable_until: float

    @property
    def slots(self) -> int:
        return len(self.reply.offsets)


class SlotRequests:
    """The requests of one session for slots to put blocks in place, and the slots that the session holds ahead for its
    next put. `begin` sends a request; `call_later` calls a function after some seconds, in another thread; `clock`
    returns seconds.
    """

    def __init__(self, begin: Begin, call_later: CallLater, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._begin, self._call_later, self._clock = begin, call_later, clock
        self._lock = threading.Lock()
        self._ahead: Granted | None = None
        self._held_since = 0.0
        self._looks_at = -math.inf  # when `_give_back_unused` is called next
        self._awaited_until = 0.0  # the answer to a request for slots ahead,
        self._awaited: Call | None = None  # which is this one

    def request(
        self, size: SlotSize, blocks: int, deadline_s: float, parent: bytes = b"", *, ahead: bool = False
    ) -> Call:
        """Ask the daemon for `blocks` slots of `size`, to be answered within `deadline_s` seconds, and return the call.
        `parent` is the key of the block that the first new block continues; the daemon keeps that block meanwhile.
        `ahead` is True if no put waits for the slots.
        """
        request = wire.ReserveSlots(
            group=size.group_id, payload_bytes=size.payload_bytes, blocks=blocks, parent=parent, ahead=ahead
        )  # fmt: skip
        return self._begin(wire.Request(reserve_slots=request), deadline_s)

    def granted(self, size: SlotSize, reply: wire.ReserveSlotsReply, requested_at: float) -> Granted | None:
        """Return the slots that the daemon's `reply` grants, or None if it grants none. `requested_at` is the time of
        the request, in seconds of the clock.
        """
        if not reply.reservation:
            return None
        return Granted(size, reply, requested_at + reply.expires_in_ms / 1000 * USABLE_SHARE)

    def abandon(self, call: Call) -> None:
        """Stop waiting for a request for slots. If they are granted later, they are given back."""
        call.abandon(lambda late: self.give_back(late.reserve_slots.reservation))

    def give_back(self, reservation: int) -> None:
        if reservation:
            request = wire.Request(reserve_slots=wire.ReserveSlots(give_back=reservation))
            self._begin(request, _AHEAD_DEADLINE_S).abandon()

    # Ahead

    def take_ahead(self, size: SlotSize, usable_s: float) -> Granted | None:
        """Return the slots that are held ahead, which belong to the caller now. Return None, and give them back, unless
        they are of `size` and may be written to for `usable_s` more seconds. Slots that are about to be granted are
        waited for.
        """
        if self._awaited is not None and self._awaited_until:
            self._awaited.wait(_AHEAD_WAIT_S)
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is None:
            return None
        if ahead.size == size and self._clock() + usable_s <= ahead.usable_until:
            return ahead
        self.give_back(ahead.reply.reservation)
        return None

    def request_ahead(self, size: SlotSize, blocks: int) -> Callable[[], None]:
        """Ask the daemon for `blocks` slots of `size` for the next put, unless slots are held or requested already. The
        call does not wait for the answer. Return a function to call once the present put needs no other answer: from
        then on the slots are held as soon as they are granted.
        """
        blocks, now = min(blocks, AHEAD_BYTES // size.nbytes), self._clock()
        with self._lock:
            if not blocks or self._ahead is not None or now < self._awaited_until:
                return _nothing
            self._awaited, self._awaited_until = None, now + _AHEAD_DEADLINE_S
        call = self.request(size, blocks, _AHEAD_DEADLINE_S, ahead=True)

        def hold_granted() -> None:
            call.abandon(lambda late: self.hold(self.granted(size, late.reserve_slots, now)))
            self._awaited = call

        return hold_granted

    def give_back_ahead(self) -> None:
        """Give back the slots that are held ahead or about to be granted. Call it when no put follows or the stream has
        ended.
        """
        if self._awaited is not None and self._awaited_until:
            self._awaited.wait(_CLOSE_WAIT_S)
        with self._lock:
            ahead, self._ahead = self._ahead, None
        if ahead is not None:
            self.give_back(ahead.reply.reservation)

    def hold(self, granted: Granted | None) -> None:
        """Keep the `granted` slots for the next put, or give them back if other slots are held already."""
        now = self._clock()
        with self._lock:
            self._awaited_until = 0.0
            is_taken = granted is not None and self._ahead is None
            looks_in = is_taken and now > self._looks_at + _LATE_S
            if is_taken:
                self._ahead, self._held_since = granted, now
            if looks_in:
                self._looks_at = now + IDLE_S
        if granted is not None and not is_taken:
            self.give_back(granted.reply.reservation)
        if looks_in:
            self._call_later(IDLE_S, self._give_back_unused)

    def _give_back_unused(self) -> None:
        unused = None
        with self._lock:
            now = self._clock()
            left_s = self._held_since + IDLE_S - now
            if left_s <= 0:
                unused, self._ahead = self._ahead, None
            is_held = self._ahead is not None
            self._looks_at = now + left_s if is_held else -math.inf
        if is_held:
            self._call_later(left_s, self._give_back_unused)
        if unused is not None:
            self.give_back(unused.reply.reservation)


def _nothing() -> None:
    """Do nothing: no slots were requested."""
