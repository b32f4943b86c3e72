"""Putting a run of blocks into a daemon of the first release: reserve, write into staging, commit, overlapped.

Owns the pipeline of one put. Blocks are reserved as many at a time as the daemon has staging for, written in
place, and committed in small batches while the next ones are written, so that the daemon's copy runs beside
ours.
Never does: wait past the deadline. Invariants: each reservation is committed or aborted, also when a payload
function raises or the answer to a reserve comes too late; each block ends with one status.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from kvstore_client.asking import Asker
from kvstore_client.connection import Connection
from kvstore_client.put_order import (
    MIN_RETRY_S,
    PENDING_PATIENCE_S,
    REASON_NO_ROOM,
    REASON_PENDING,
    REASON_TOO_LARGE,
    THROTTLED_RETRY_S,
    PutOrder,
)
from kvstore_client.receipt import PRESENT, THROTTLED, PutReceipt
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.staging import write_slot
from kvstore_client.stream import PendingCall
from kvstore_proto.v1 import kvstore_pb2 as wire

COMMIT_BLOCKS = 8
COMMIT_EVERY_S = 0.001  # payloads that are there faster than this go in larger commits: each costs the daemon 0.3 ms


class ReservedPut:
    """One put; use once: `run()`, in the caller's thread."""

    def __init__(
        self,
        asker: Asker,
        connection: Connection,
        order: PutOrder,
        deadline_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._asker, self._connection, self._order = asker, connection, order
        self._clock, self._sleep = clock, sleep
        self._started = clock()
        self._deadline = self._started + deadline_s
        self._receipt = PutReceipt(len(order.payloads), clock=clock)
        self._todo = deque(range(len(order.payloads)))
        self._granted: dict[int, int] = {}  # reservation id -> block, reserved but not committed
        self._without_room: set[int] = set()  # blocks that the daemon has asked us to bring again later
        self._commits: deque[tuple[PendingCall, list[int]]] = deque()

    def run(self) -> PutReceipt:
        """Raises what a payload function raises, and KVStoreError when the daemon finds the request wrong."""
        try:
            while self._todo:
                retry_s = self._reserve_and_write()
                if self._todo and not self._make_room(retry_s):
                    break
            while self._commits:
                self._collect_commit()
        finally:
            self._abort_granted()
        return self._receipt

    def _reserve_and_write(self) -> float:
        """One reserve for all that is left, and the writing of what it grants. Seconds to wait before the
        next.
        """
        wanted = list(self._todo)[: self._connection.max_keys]
        reply = self._reserve(wanted)
        if reply == THROTTLED:  # the request as a whole: over a rate, not out of staging
            return THROTTLED_RETRY_S
        if reply == REASON_DEADLINE and self._without_room.issuperset(self._todo):
            self._give_up()  # the last question of several came too late: why is known from the one before
            return 0.0
        if isinstance(reply, str):
            self._receipt.reason = reply
            self._todo.clear()
            return 0.0
        self._todo = deque(self._todo[i] for i in range(len(wanted), len(self._todo)))
        again: list[int] = []
        slots: list[tuple[int, int, int]] = []
        for block, status, reservation, offset in zip(
            wanted, reply.statuses, reply.reservation_ids, reply.staging_offsets, strict=True
        ):
            if status == wire.RESERVE_STATUS_RESERVED:
                self._granted[reservation] = block
                slots.append((block, reservation, offset))
            elif status == wire.RESERVE_STATUS_PRESENT:
                self._receipt.statuses[block] = PRESENT
            elif status == wire.RESERVE_STATUS_THROTTLED or (
                status == wire.RESERVE_STATUS_PENDING and self._clock() < self._started + PENDING_PATIENCE_S
            ):
                again.append(block)
                if status == wire.RESERVE_STATUS_THROTTLED:
                    self._without_room.add(block)
            elif status == wire.RESERVE_STATUS_PENDING:
                self._receipt.statuses[block] = THROTTLED
                self._receipt.reason = REASON_PENDING
            elif status == wire.RESERVE_STATUS_TOO_LARGE:
                self._receipt.reason = REASON_TOO_LARGE
            else:
                self._receipt.reason = "the daemon refused the block"
        self._todo.extendleft(reversed(again))
        self._write_and_commit(slots)
        return max(reply.retry_after_ms / 1000, MIN_RETRY_S)

    def _reserve(self, wanted: list[int]) -> wire.ReserveReply | str:
        order = self._order
        numbers = [order.first_block + block for block in wanted]
        request = wire.Request(
            reserve=wire.Reserve(
                group=order.group_id,
                keys=b"".join(order.chain.keys[number] for number in numbers),
                parents=b"".join(order.chain.parent_of(number) for number in numbers),
                payload_bytes=order.payload_bytes,
            )
        )
        timeout_s = min(self._asker.deadline_s, max(self._deadline - self._clock(), MIN_RETRY_S))
        answer = self._asker.ask(self._connection, request, timeout_s, self._abort_late)
        return answer if isinstance(answer, str) else answer.reserve

    def _write_and_commit(self, slots: list[tuple[int, int, int]]) -> None:
        staging = self._connection.staging
        order = self._order
        assert staging is not None or not slots, "a slot was granted to a client without staging"
        batch: list[int] = []
        commit_from = self._clock()
        for position, (block, reservation, offset) in enumerate(slots):
            if self._clock() >= self._deadline:
                for late_block, _, _ in slots[position:]:
                    self._receipt.statuses[late_block] = THROTTLED
                self._receipt.reason = REASON_DEADLINE
                break
            assert staging is not None
            tokens = order.chain.tokens_of(order.first_block + block)
            write_slot(staging, offset, order.payloads[block], order.payload_bytes, tokens)
            batch.append(reservation)
            if len(batch) >= COMMIT_BLOCKS and self._clock() >= commit_from:
                self._commit(batch)
                batch, commit_from = [], self._clock() + COMMIT_EVERY_S
        if batch:
            self._commit(batch)

    def _commit(self, reservations: list[int]) -> None:
        blocks = [self._granted.pop(reservation) for reservation in reservations]
        request = wire.Request(
            deadline_ms=max(1, int((self._deadline - self._clock()) * 1000)),
            commit=wire.Commit(reservation_ids=reservations, durability=self._order.durability),
        )
        self._commits.append((self._connection.stream.submit(request), blocks))

    def _make_room(self, retry_s: float) -> bool:
        """Before reserving again: the oldest commit's answer frees its slots, else wait. False when time is
        up.
        """
        in_time = True
        if self._commits:
            self._collect_commit()
        elif self._clock() + retry_s < self._deadline:
            self._sleep(retry_s)
        else:
            in_time = False
        if in_time and self._clock() < self._deadline:
            return True
        self._give_up()
        return False

    def _give_up(self) -> None:
        for block in self._todo:
            self._receipt.statuses[block] = THROTTLED
        self._receipt.reason = REASON_NO_ROOM
        self._todo.clear()

    def _collect_commit(self) -> None:
        call, blocks = self._commits.popleft()
        response = call.wait(self._deadline - self._clock())
        if response is None:
            self._connection.stream.abandon(call)
            self._asker.link.timed_out()
            self._receipt.reason = REASON_DEADLINE
            return
        answer = self._asker.judge(self._connection, response)
        if isinstance(answer, str):
            self._receipt.reason = answer
        else:
            self._receipt.record_commit(call, answer, blocks)

    def _abort_granted(self) -> None:
        if self._granted:
            self._abort(list(self._granted))
            self._granted.clear()

    def _abort_late(self, response: wire.Response) -> None:
        self._abort([reservation for reservation in response.reserve.reservation_ids if reservation])

    def _abort(self, reservations: list[int]) -> None:
        stream = self._connection.stream
        for start in range(0, len(reservations), self._connection.max_keys):
            part = reservations[start : start + self._connection.max_keys]
            stream.abandon(stream.submit(wire.Request(abort=wire.Abort(reservation_ids=part))))
