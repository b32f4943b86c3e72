"""Putting a run of blocks: write them into the staging memory and say so, in one message or a few.

Owns the pipeline of one put; where the daemon takes blocks in place, that of what could not go that way (`in_place`).
What is written within a millisecond goes in one message, since each costs the daemon some 0.3 ms; what takes longer is
sent in parts, so that the daemon's copy runs beside ours. Blocks that the lookup index shows are not written: they are
named, and the daemon says whether they are there or wanted after all.
Never does: wait past the deadline. Invariants: what the daemon may be reading is not written again (see `loan`); what
was not sent is free again at the end, also when a payload function raises; each block ends with one status; what this
put keeps in the loan, to send it again, never keeps itself from going on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvstore_client.asking import Asker
from kvstore_client.batch import NOWHERE, Batch, names_of
from kvstore_client.connection import Connection
from kvstore_client.in_place import InPlacePut
from kvstore_client.loan import Extent, Loan, Use
from kvstore_client.put_order import (
    MIN_RETRY_S,
    REASON_NO_ROOM,
    REASON_PENDING,
    REASON_TOO_LARGE,
    THROTTLED_RETRY_S,
    PutOrder,
)
from kvstore_client.receipt import THROTTLED, PutReceipt
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.staging import write_payload, write_tokens
from kvstore_client.stream import PendingCall
from kvstore_client.undecided import Undecided
from kvstore_proto.arena import ALIGNMENT_BYTES, slot_bytes
from kvstore_proto.lookup_index import ABSENT, UNKNOWN
from kvstore_proto.v1 import kvstore_pb2 as wire

RUN_BYTES = 8 * 2**20
SEND_EVERY_S = 0.001  # twice that once there is much: of 64 blocks of 4 MiB a tenth of the time
SHORT_MESSAGES = 4
ROOM_WAIT_S = 0.05  # before asking again whether the daemon is still there


def put_blocks(
    asker: Asker,
    connection: Connection,
    order: PutOrder,
    deadline_s: float,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> PutReceipt:
    """Store what `order` says. Raises what a payload function raises, and KVStoreError when the daemon finds the
    request wrong.
    """
    deadline = clock() + deadline_s
    receipt = PutReceipt(len(order.payloads), clock=clock)
    blocks: Sequence[int] = range(len(order.payloads))
    if connection.writable.is_offered:
        believed = present_by_index(connection, order)
        blocks = InPlacePut(asker, connection, order, receipt, believed, deadline, clock=clock).run()
        if not blocks:
            return receipt
    reason = connection.loan.obtain(partial(asker.ask, connection), min(asker.deadline_s, max(deadline - clock(), 0.0)))
    if reason:
        receipt.reason = reason
        return receipt
    return Put(asker, connection, order, deadline - clock(), receipt=receipt, blocks=blocks, clock=clock).run()


def present_by_index(connection: Connection, order: PutOrder) -> set[int]:
    """Blocks of the put that the lookup index shows."""
    index = connection.index.mapped
    if index is None:
        return set()
    first = order.first_block
    keys = order.chain.keys[first : first + len(order.payloads)]
    return {block for block, code in enumerate(index.codes(keys)) if code not in (ABSENT, UNKNOWN)}


class Put:
    """One put; use once: `run()`, in the caller's thread. `blocks` of the order, all by default, are entered into
    `receipt`, which may know of others already."""

    def __init__(
        self,
        asker: Asker,
        connection: Connection,
        order: PutOrder,
        deadline_s: float,
        *,
        receipt: PutReceipt | None = None,
        blocks: Iterable[int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._asker, self._connection, self._order = asker, connection, order
        self._loan: Loan = connection.loan
        self._clock, self._sleep = clock, sleep
        self._deadline = clock() + deadline_s
        self._slot_bytes = slot_bytes(order.payload_bytes)
        self._receipt = receipt or PutReceipt(len(order.payloads), clock=clock)
        self._todo = deque(range(len(order.payloads)) if blocks is None else blocks)
        self._believed = present_by_index(connection, order)
        self._written: dict[int, tuple[int, Extent]] = {}  # blocks to send again, as they lie
        self._undecided = Undecided()
        self._sent: deque[Batch] = deque()
        self._unsent = Batch()
        self._messages = 0  # sent so far
        self._is_starved = False

    def run(self) -> PutReceipt:
        """As `put_blocks`."""
        if self._slot_bytes > self._loan.size_bytes:
            self._receipt.reason = REASON_TOO_LARGE
            return self._receipt
        try:
            while self._todo or self._sent:
                if self._todo and self._write():
                    self._send()
                elif self._sent:
                    self._collect()
                else:
                    self._find_room()
        finally:
            self._leave()
        return self._receipt

    # Writing

    def _write(self) -> bool:
        """Fill the next message; False when nothing could be put in, for want of room or of time."""
        self._collect_answered()
        batch, sent_at = self._unsent, self._clock() + SEND_EVERY_S * (1 if self._messages < SHORT_MESSAGES else 2)
        while self._todo and len(batch.blocks) < self._connection.max_keys:
            block = self._todo[0]
            if self._clock() >= self._deadline:
                self._give_up(REASON_NO_ROOM if self._is_starved else REASON_DEADLINE)
            elif block in self._believed:
                batch.add(self._todo.popleft(), NOWHERE, None)
            elif block in self._written:
                batch.add(self._todo.popleft(), *self._written.pop(block))
            elif not self._write_run(batch) or self._clock() >= sent_at:
                break
        return bool(batch.blocks)

    def _write_run(self, batch: Batch) -> bool:
        """Write the next blocks side by side; False when there is no room for one, or no time for all."""
        order, size = self._order, self._slot_bytes
        extent = self._loan.take(size, self._run_length(batch))
        if extent is None:
            return False
        staging = self._connection.staging
        assert staging is not None, "a loan without staging"
        count, first, written = extent.users, self._todo[0], 0
        tokens = order.chain.tokens_of_run(order.first_block + first, count)
        try:
            write_tokens(staging[extent.offset : extent.offset + extent.nbytes], count, tokens)
            for place in range(extent.offset, extent.offset + extent.nbytes, size):
                if self._clock() >= self._deadline:
                    return False
                write_payload(staging, place, order.payloads[first + written], order.payload_bytes)
                written += 1
        finally:
            batch.add_run([self._todo.popleft() for _ in range(written)], extent, size)
            if written < count:
                self._loan.end(Use([extent] * (count - written)))
        return True

    def _run_length(self, batch: Batch) -> int:
        """How many of the next blocks follow upon each other and are to be written."""
        most = min(max(RUN_BYTES // self._slot_bytes, 1), self._connection.max_keys - len(batch.blocks))
        first, length = self._todo[0], 0
        for block in self._todo:
            if length == most or block != first + length or block in self._believed or block in self._written:
                break
            length += 1
        return length

    def _send(self) -> None:
        batch, self._unsent = self._unsent, Batch()
        self._messages += 1
        order = self._order
        keys, parents = names_of(order.chain, [order.first_block + block for block in batch.blocks])
        request = wire.Request(
            deadline_ms=max(1, int((self._deadline - self._clock()) * 1000)),
            store=wire.Store(
                loan=self._loan.number,
                group=order.group_id,
                keys=keys,
                parents=parents,
                payload_bytes=order.payload_bytes,
                pages=[place // ALIGNMENT_BYTES + 1 for place in batch.places],  # NOWHERE gives 0
                durability=order.durability,
            ),
        )
        self._sent.append(batch)  # first: from here on its bytes are the daemon's until it answers
        batch.call = self._connection.stream.submit(request)

    # Answers

    def _collect_answered(self) -> None:
        """Take in what is answered, without waiting: the bytes can be used again."""
        while self._sent:
            call = self._sent[0].call
            response = None if call is None else call.wait(0.0)
            if response is None:
                return
            self._take(self._sent.popleft(), response)

    def _collect(self) -> None:
        """Wait for the oldest message's answer."""
        batch = self._sent[0]
        assert batch.call is not None
        response = batch.call.wait(self._deadline - self._clock())
        if response is None:
            self._sent.popleft()
            self._abandon(batch)
            self._asker.link.timed_out()
            self._receipt.reason = REASON_DEADLINE
        else:
            self._take(self._sent.popleft(), response)

    def _take(self, batch: Batch, response: wire.Response) -> None:
        assert batch.call is not None
        is_still_read = response.HasField("error") and response.error.kind != wire.ERROR_KIND_THROTTLED
        if is_still_read:  # perhaps: it may be the stream's end, which says nothing of its bytes
            self._loan.leave_unanswered(batch.use)
        try:
            answer = self._asker.judge(self._connection, response)
            if answer == THROTTLED:  # the request as a whole: over a rate
                self._undecided.refused(batch.blocks)
                self._send_again(batch, range(len(batch.blocks)), THROTTLED_RETRY_S)
            elif isinstance(answer, str):
                self._receipt.reason = answer
                if self._connection.stream.ended:
                    self._todo.clear()
            else:
                self._take_statuses(batch, batch.call, answer)
        finally:  # not before: nobody else may have bytes that are to be sent again
            if not is_still_read:
                self._loan.end(batch.use)

    def _take_statuses(self, batch: Batch, call: PendingCall, answer: wire.Response) -> None:
        statuses = answer.store.statuses
        again = self._undecided.answered(batch.blocks, statuses, self._clock(), self._deadline)
        if self._undecided.gave_up:
            self._receipt.reason = REASON_PENDING
        decided = [NOWHERE if position in again else block for position, block in enumerate(batch.blocks)]
        self._receipt.record(call, answer, decided)
        if wire.STORE_STATUS_PRESENT in statuses:
            self._connection.index.get(may_wait=False)  # it pays to know, from the next put on
        self._send_again(batch, again, MIN_RETRY_S if wire.STORE_STATUS_AGAIN in statuses else 0.0)

    def _send_again(self, batch: Batch, positions: Sequence[int], delay_s: float) -> None:
        for position in reversed(positions):
            block, extent = batch.blocks[position], batch.extents[position]
            self._believed.discard(block)
            if extent is not None:
                self._loan.hold(extent)
                self._written[block] = (batch.places[position], extent)
            self._todo.appendleft(block)
        if delay_s and positions:
            self._sleep(min(delay_s, max(self._deadline - self._clock(), 0.0)))

    # The end

    def _find_room(self) -> None:
        """All of the loan is in use: by blocks that this put keeps to send them again, or else by other threads, and
        by requests that were never answered."""
        if self._written:  # a block before them needs the room: they are written again in their turn
            self._let_go_of_written()
            return
        self._is_starved = True
        left_s = self._deadline - self._clock()
        if self._connection.stream.ended:
            self._give_up(REASON_NO_DAEMON)
        elif left_s > 0:
            self._wait_for_room(left_s)

    def _wait_for_room(self, left_s: float) -> None:
        self._loan.renew(partial(self._asker.ask, self._connection), min(self._asker.deadline_s, left_s))
        extent = self._loan.take(self._slot_bytes, 1, min(ROOM_WAIT_S, max(self._deadline - self._clock(), 0.0)))
        if extent is not None:
            self._is_starved = False
            self._loan.end(Use([extent]))

    def _let_go_of_written(self) -> None:
        self._loan.end(Use([extent for _, extent in self._written.values()]))
        self._written.clear()

    def _give_up(self, reason: str) -> None:
        for block in self._todo:
            self._receipt.statuses[block] = THROTTLED
        self._receipt.reason = reason
        self._todo.clear()

    def _abandon(self, batch: Batch) -> None:
        answered_late = self._loan.leave_unanswered(batch.use)
        if batch.call is not None:
            self._connection.stream.abandon(batch.call, answered_late)

    def _leave(self) -> None:
        """Whatever happened: what is not sent is free."""
        self._loan.end(self._unsent.use)
        self._let_go_of_written()
        for batch in self._sent:
            self._abandon(batch)
