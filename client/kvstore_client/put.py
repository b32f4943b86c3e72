"""A put writes a run of blocks into the staging memory and sends their keys, in one message or a few.

If the daemon accepts blocks in place (`in_place`), only the blocks that are left over go through staging. A put never
waits past the deadline, unless a payload function does. Invariants: bytes that the daemon may be reading are not
written again (see `staging`). Bytes that were not sent are free again at the end, even when a payload function raises.
Each block ends with one status. Written blocks that a put keeps to send them again never block the put itself.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore_client.call import Call, Late
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.errors import invalid
from kvstore_client.in_place import InPlacePut
from kvstore_client.put_part import PutPart, SlotRun, StoreMessage
from kvstore_client.receipt import THROTTLED, PutOrder, PutReceipt
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.staging import ClientStaging, Use
from kvstore_proto.arena import ALIGNMENT_BYTES
from kvstore_proto.lookup_index import ABSENT, UNKNOWN
from kvstore_proto.v1 import kvstore_pb2 as wire

SMALL_RUN_BYTES = 8 << 20  # more is written for one message only if half of the staging memory stays free for the next
ROOM_WAIT_S = 0.05  # before asking again whether the daemon is still there
MIN_RETRY_S = 0.001
THROTTLED_RETRY_S = 0.01
REASON_PENDING: Final = "another client is storing the same block"
REASON_NO_ROOM: Final = "no room in the staging memory before the deadline"
REASON_NO_STAGING: Final = "the daemon granted no staging memory: raise its host.staging, or open fewer sessions"
REASON_TOO_LARGE: Final = "too large: a block has to fit into the staging memory of this session"
PENDING_PATIENCE_S = 0.25  # for a block that another client is writing
_DECIDED = frozenset({wire.STORE_STATUS_STORED, wire.STORE_STATUS_PRESENT})


def put(
    daemon: DaemonSession, order: PutOrder, deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> PutReceipt:
    """Store the blocks of `order` within `deadline_s` seconds, and return the receipt with the status of each block.
    Raises the errors of payload functions, and KVStoreError if the daemon or the client's own check finds the
    request wrong.
    """
    if daemon.reads_only:
        raise invalid("this session was opened with staging_bytes=0, so it can only read")
    size, limit = order.payload_bytes, daemon.max_block_bytes
    if limit and size > limit:
        raise invalid(f"a block of {size} bytes is over the daemon's limit of {limit}")
    staging = daemon.staging
    if staging is None:
        return PutReceipt(len(order), REASON_NO_STAGING)
    deadline = clock() + deadline_s
    receipt = PutReceipt(len(order), clock=clock)
    blocks: Sequence[int] = range(len(order))
    believed = present_by_index(daemon, order)
    if daemon.writable.is_offered:
        blocks = InPlacePut(daemon, order, receipt, deque(blocks), believed, deadline, clock).run()
    if blocks:
        reason = staging.obtain(daemon.call, min(daemon.deadline_s, max(deadline - clock(), 0.0)))
        if reason:
            receipt.reason = reason
        else:
            StagedPut(daemon, order, receipt, deque(blocks), believed, deadline, clock, staging).run()
    return receipt


def present_by_index(daemon: DaemonSession, order: PutOrder) -> set[int]:
    """Return the numbers of the blocks of `order` that the lookup index of `daemon` shows as stored. The set is empty
    if no index is mapped.
    """
    index = daemon.index.mapped
    if index is None:
        return set()
    return {block for block, code in enumerate(index.codes(order.keys())) if code not in (ABSENT, UNKNOWN)}


class PendingOutcomes:
    """A record of the blocks of one put that must be sent to the daemon again, and of the time since another client
    began to write each. A block whose predecessor was missing is sent again only while an earlier block of the put is
    to be sent again. `gave_up` is True once another client was writing a block for longer than `PENDING_PATIENCE_S`
    seconds.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._other_client_since: dict[int, float] = {}  # of these, those that another client is writing
        self.gave_up = False

    def refused(self, blocks: Iterable[int]) -> None:
        """Note that the daemon refused a request before it looked at `blocks`, so that all of them must be sent
        again.
        """
        self._blocks.update(blocks)

    def answered(self, blocks: Sequence[int], statuses: bytes, now: float, deadline: float) -> list[int]:
        """Note the daemon's answer about `blocks`: `statuses` has one byte for each. Return the positions in `blocks`
        whose blocks must be sent again before `deadline`. `now` and `deadline` are seconds of the same clock.
        """
        if not self._blocks and not self._other_client_since and _DECIDED.issuperset(statuses):
            return []  # the common case: each of them once, none of them again
        again: list[int] = []
        for position, (block, status) in enumerate(zip(blocks, statuses, strict=False)):
            if status != wire.STORE_STATUS_AGAIN:
                self._other_client_since.pop(block, None)
            if self._goes_again(block, status, now, deadline):
                self._blocks.add(block)
                again.append(position)
            else:
                self._blocks.discard(block)
        return again

    def _goes_again(self, block: int, status: int, now: float, deadline: float) -> bool:
        if status == wire.STORE_STATUS_AGAIN:
            since = self._other_client_since.setdefault(block, now)
            is_patient = now < min(since + PENDING_PATIENCE_S, deadline)
            self.gave_up = self.gave_up or not is_patient
            return is_patient
        if status == wire.STORE_STATUS_ORPHANED:
            return any(before < block for before in self._blocks)
        return status == wire.STORE_STATUS_WANTED


@dataclass(eq=False)
class StagedPut(PutPart):
    """The part of a put that writes blocks into staging memory, from where the daemon copies them. Call `run` once."""

    _staging: ClientStaging
    _pending: PendingOutcomes = field(default_factory=PendingOutcomes, init=False)
    _is_starved: bool = field(default=False, init=False)

    def run(self) -> None:
        """Store the blocks and enter their statuses into the receipt of the put. Raises the errors of payload
        functions, and KVStoreError if the daemon finds a request wrong.
        """
        if self._slot_bytes > len(self._staging.memory):
            self._receipt.reason = REASON_TOO_LARGE
            return
        try:
            while self._todo or self._sent:
                if self._todo and self._write():
                    self._unsent.loan = self._staging.loan
                    self._send()
                elif self._sent:
                    self._collect()
                else:
                    self._find_room()
        finally:
            self._leave()

    def _take_run(self, most: int) -> SlotRun | None:
        size = self._slot_bytes
        run_bytes = max(SMALL_RUN_BYTES, len(self._staging.memory) // 2)
        extent = self._staging.take(size, min(most, max(run_bytes // size, 1)))
        if extent is None:
            return None
        page = extent.offset // ALIGNMENT_BYTES + 1
        return SlotRun(self._staging.memory, extent.offset, extent.users, page, size // ALIGNMENT_BYTES, extent)

    def _leave_unwritten(self, run: SlotRun, slots: int) -> None:
        if slots and run.extent is not None:
            self._staging.end(Use([run.extent] * slots))

    def _late(self) -> None:
        self._give_up(REASON_NO_ROOM if self._is_starved else REASON_DEADLINE)

    # Answers

    def _take(self, message: StoreMessage, call: Call, response: wire.Response) -> None:
        is_still_read = response.HasField("error") and response.error.kind != wire.ERROR_KIND_THROTTLED
        if is_still_read:  # perhaps: it may be the stream's end, which says nothing of its bytes
            self._staging.leave_unanswered(message.use)
        try:
            answer = call.judge(response)
            if answer == THROTTLED:  # the request as a whole: over a rate
                self._pending.refused(message.blocks)
                wait_s = max(THROTTLED_RETRY_S, response.error.retry_after_ms / 1000)
                self._send_again(message, range(len(message.blocks)), wait_s * random.uniform(0.5, 1.5))
            elif isinstance(answer, str):
                self._receipt.reason = answer
                if self._daemon.stream.ended:
                    self._todo.clear()
            else:
                statuses = answer.store.statuses
                again = self._pending.answered(message.blocks, statuses, self._clock(), self._deadline)
                if self._pending.gave_up:
                    self._receipt.reason = REASON_PENDING
                self._enter(message, call, answer, again)
                self._send_again(message, again, MIN_RETRY_S if wire.STORE_STATUS_AGAIN in statuses else 0.0)
        finally:  # not before: no other request may get bytes that are to be sent again
            if not is_still_read:
                self._staging.end(message.use)

    def _unanswered(self, message: StoreMessage) -> Late:
        return self._staging.leave_unanswered(message.use)

    def _send_again(self, message: StoreMessage, positions: Sequence[int], delay_s: float) -> None:
        for position in reversed(positions):
            block, extent = message.blocks[position], message.extents[position]
            self._believed.discard(block)
            if extent is not None:
                self._staging.hold(extent)
                self._written[block] = (message.pages[position], extent)
            self._todo.appendleft(block)
        if delay_s and positions:
            time.sleep(min(delay_s, max(self._deadline - self._clock(), 0.0)))

    # The end

    def _find_room(self) -> None:
        """Free staging memory when all of it is in use: by blocks that this put keeps to send them again, or by other
        threads and by requests without an answer.
        """
        if self._written:  # a block before them needs the room: they are written again later
            self._free_written()
            return
        self._is_starved = True
        left_s = self._deadline - self._clock()
        if self._daemon.stream.ended:
            self._give_up(REASON_NO_DAEMON)
        elif left_s > 0:
            self._wait_for_room(left_s)

    def _wait_for_room(self, left_s: float) -> None:
        self._staging.renew(self._daemon.call, min(self._daemon.deadline_s, left_s))
        extent = self._staging.take(self._slot_bytes, 1, min(ROOM_WAIT_S, max(self._deadline - self._clock(), 0.0)))
        if extent is not None:
            self._is_starved = False
            self._staging.end(Use([extent]))

    def _free_written(self) -> None:
        self._staging.end(Use([extent for _, extent in self._written.values()]))
        self._written.clear()

    def _give_up(self, reason: str) -> None:
        for block in self._todo:
            self._receipt.statuses[block] = THROTTLED
        self._receipt.reason = reason
        self._todo.clear()

    def _leave(self) -> None:
        """Free the staging memory that was not sent, however the put has ended."""
        self._staging.end(self._unsent.use)
        self._free_written()
        for message in self._sent:
            answered_late = self._unanswered(message)
            if message.call is not None:
                message.call.abandon(answered_late)
