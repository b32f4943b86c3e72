"""Put: write a run of blocks into the staging memory and send their keys, in one message or a few.

The module owns the pipeline of one put; if the daemon accepts blocks in place, only for the blocks left over by that
(`in_place`). Blocks written within a millisecond go in one message, since each message costs the daemon some 0.3 ms; a
longer write is sent in parts, so that the daemon copies while the client writes. Blocks that the lookup index shows are
not written: only their keys are sent, and the daemon says whether it wants them after all. A put waits past the
deadline only in a payload function. Invariants: bytes that the daemon may be reading are not written again (see
`staging`); slots that were not sent are free again at the end, even if a payload function raises; each block ends with
one status; written blocks that a put keeps to send again never block the put itself.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvstore_client.call import Call
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.errors import invalid
from kvstore_client.in_place import InPlacePut
from kvstore_client.payload import PayloadWriter, write_tokens
from kvstore_client.receipt import THROTTLED, PutOrder, PutReceipt
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON
from kvstore_client.staging import Extent, Staging, Use
from kvstore_proto.arena import ALIGNMENT_BYTES, slot_bytes
from kvstore_proto.lookup_index import ABSENT, UNKNOWN
from kvstore_proto.v1 import kvstore_pb2 as wire

RUN_BYTES = 8 * 2**20
SEND_EVERY_S = 0.001  # twice that after the first messages: of 64 blocks of 4 MiB a tenth of the time
SHORT_MESSAGES = 4
ROOM_WAIT_S = 0.05  # before asking again whether the daemon is still there
MIN_RETRY_S = 0.001
THROTTLED_RETRY_S = 0.01
REASON_PENDING: Final = "another client is storing the same block"
REASON_NO_ROOM: Final = "no room in the staging memory before the deadline"
REASON_NO_STAGING: Final = "the daemon granted no staging memory: raise its host.staging, or open fewer sessions"
REASON_TOO_LARGE: Final = "too large: a block has to fit into the staging memory of this session"
NOWHERE = -1
PENDING_PATIENCE_S = 0.25  # for a block that another client is writing
_DECIDED = frozenset({wire.STORE_STATUS_STORED, wire.STORE_STATUS_PRESENT})


def put(
    daemon: DaemonSession, order: PutOrder, deadline_s: float, *, clock: Callable[[], float] = time.monotonic
) -> PutReceipt:
    """Store the blocks of `order`. Raises the errors of payload functions, and KVStoreError if the request is wrong, by
    the daemon or by the client's own check.
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
        blocks = InPlacePut(daemon, order, receipt, believed, deadline, clock=clock).run()
    if blocks:
        reason = staging.obtain(daemon.call, min(daemon.deadline_s, max(deadline - clock(), 0.0)))
        if reason:
            receipt.reason = reason
        else:
            StagedPut(daemon, staging, order, receipt, blocks, believed, deadline, clock=clock).run()
    return receipt


def present_by_index(daemon: DaemonSession, order: PutOrder) -> set[int]:
    """Return the blocks of the put that the lookup index shows; it is asked once a put."""
    index = daemon.index.mapped
    if index is None:
        return set()
    return {block for block, code in enumerate(index.codes(order.keys())) if code not in (ABSENT, UNKNOWN)}


class StagedPut:
    """Some blocks of one put; use once: `run()`, in the caller's thread. Their outcomes are entered into `receipt`.
    `believed`: blocks that seem to be stored, and are named without being written until the daemon wants them.
    """

    def __init__(
        self,
        daemon: DaemonSession,
        staging: Staging,
        order: PutOrder,
        receipt: PutReceipt,
        blocks: Iterable[int],
        believed: set[int],
        deadline: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._daemon, self._staging, self._order, self._receipt = daemon, staging, order, receipt
        self._clock = clock
        self._deadline = deadline
        self._slot_bytes = slot_bytes(order.payload_bytes)
        self._todo, self._believed = deque(blocks), believed
        self._written: dict[int, tuple[int, Extent]] = {}  # blocks to send again, and where they are
        self._pending = PendingOutcomes()
        self._sent: deque[StoreCall] = deque()
        self._unsent = StoreCall()
        self._messages = 0  # sent so far
        self._is_starved = False

    def run(self) -> None:
        """Store the blocks, with the rules of `put`."""
        if self._slot_bytes > len(self._staging.memory):
            self._receipt.reason = REASON_TOO_LARGE
            return
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

    # Writing

    def _write(self) -> bool:
        """Fill the next message; return False if there was no room or no time for a block."""
        self._collect_answered()
        store, sent_at = self._unsent, self._clock() + SEND_EVERY_S * (1 if self._messages < SHORT_MESSAGES else 2)
        while self._todo and len(store.blocks) < self._daemon.max_keys:
            block = self._todo[0]
            if self._clock() >= self._deadline:
                self._give_up(REASON_NO_ROOM if self._is_starved else REASON_DEADLINE)
            elif block in self._believed:
                store.add(self._todo.popleft(), NOWHERE, None)
            elif block in self._written:
                store.add(self._todo.popleft(), *self._written.pop(block))
            elif not self._write_run(store) or self._clock() >= sent_at:
                break
        return bool(store.blocks)

    def _write_run(self, store: StoreCall) -> bool:
        """Write the next blocks into consecutive slots; return False without room for one, or time for all."""
        order, size, memory = self._order, self._slot_bytes, self._staging.memory
        extent = self._staging.take(size, self._run_length(store))
        if extent is None:
            return False
        count, first, written = extent.users, self._todo[0], 0
        tokens = order.chain.tokens_of_run(order.first_block + first, count)
        try:
            write_tokens(memory[extent.offset : extent.offset + extent.nbytes], count, tokens)
            with PayloadWriter(order.payload_bytes) as writer:
                for place in range(extent.offset, extent.offset + extent.nbytes, size):
                    if self._clock() >= self._deadline:
                        return False
                    writer.write(memory, place, order.payloads[first + written])
                    written += 1
        finally:
            store.add_run([self._todo.popleft() for _ in range(written)], extent, size)
            if written < count:
                self._staging.end(Use([extent] * (count - written)))
        return True

    def _run_length(self, store: StoreCall) -> int:
        """Return how many of the next blocks are consecutive and must be written."""
        most = min(max(RUN_BYTES // self._slot_bytes, 1), self._daemon.max_keys - len(store.blocks))
        first, length = self._todo[0], 0
        for block in self._todo:
            if length == most or block != first + length or block in self._believed or block in self._written:
                break
            length += 1
        return length

    def _send(self) -> None:
        store, self._unsent = self._unsent, StoreCall()
        self._messages += 1
        body = self._order.store(store.blocks, store.pages, loan=self._staging.loan)
        self._sent.append(store)  # first: from here on its bytes are the daemon's until it answers
        store.call = self._daemon.begin(wire.Request(store=body), self._deadline - self._clock())

    # Answers

    def _collect_answered(self) -> None:
        """Process the answers that have arrived, without waiting: their bytes can be used again."""
        while self._sent:
            call = self._sent[0].call
            response = None if call is None else call.wait(0.0)
            if response is None:
                return
            self._take(self._sent.popleft(), response)

    def _collect(self) -> None:
        """Wait for the oldest message's answer."""
        store = self._sent[0]
        assert store.call is not None
        response = store.call.wait(self._deadline - self._clock())
        if response is None:
            self._sent.popleft()
            store.call.expire(self._staging.leave_unanswered(store.use))
            self._receipt.reason = REASON_DEADLINE
        else:
            self._take(self._sent.popleft(), response)

    def _take(self, store: StoreCall, response: wire.Response) -> None:
        assert store.call is not None
        is_still_read = response.HasField("error") and response.error.kind != wire.ERROR_KIND_THROTTLED
        if is_still_read:  # perhaps: it may be the stream's end, which says nothing of its bytes
            self._staging.leave_unanswered(store.use)
        try:
            answer = store.call.judge(response)
            if answer == THROTTLED:  # the request as a whole: over a rate
                self._pending.refused(store.blocks)
                self._send_again(store, range(len(store.blocks)), THROTTLED_RETRY_S)
            elif isinstance(answer, str):
                self._receipt.reason = answer
                if self._daemon.stream.ended:
                    self._todo.clear()
            else:
                self._take_statuses(store, store.call, answer)
        finally:  # not before: no other request may get bytes that are to be sent again
            if not is_still_read:
                self._staging.end(store.use)

    def _take_statuses(self, store: StoreCall, call: Call, answer: wire.Response) -> None:
        statuses = answer.store.statuses
        again = self._pending.answered(store.blocks, statuses, self._clock(), self._deadline)
        if self._pending.gave_up:
            self._receipt.reason = REASON_PENDING
        decided = [NOWHERE if position in again else block for position, block in enumerate(store.blocks)]
        self._receipt.record(call, answer, decided)
        if wire.STORE_STATUS_PRESENT in statuses:  # asked at the first answer, it is there at the put's end
            self._daemon.index.get(may_wait=False)
        self._send_again(store, again, MIN_RETRY_S if wire.STORE_STATUS_AGAIN in statuses else 0.0)

    def _send_again(self, store: StoreCall, positions: Sequence[int], delay_s: float) -> None:
        for position in reversed(positions):
            block, extent = store.blocks[position], store.extents[position]
            self._believed.discard(block)
            if extent is not None:
                self._staging.hold(extent)
                self._written[block] = (store.places[position], extent)
            self._todo.appendleft(block)
        if delay_s and positions:
            time.sleep(min(delay_s, max(self._deadline - self._clock(), 0.0)))

    # The end

    def _find_room(self) -> None:
        """Find room: all of the staging memory is in use, by blocks that this put keeps to send again, or by other
        threads and requests without an answer.
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
        """Free the slots that were not sent, however the put ended."""
        self._staging.end(self._unsent.use)
        self._free_written()
        for store in self._sent:
            answered_late = self._staging.leave_unanswered(store.use)
            if store.call is not None:
                store.call.abandon(answered_late)


@dataclass(slots=True, eq=False)
class StoreCall:
    """A message's blocks (indices into the receipt), the offset of each in staging (NOWHERE: believed present), and its
    extent.
    """

    blocks: list[int] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    extents: list[Extent | None] = field(default_factory=list)
    use: Use = field(default_factory=Use)
    call: Call | None = None  # once it is sent

    @property
    def pages(self) -> list[int]:
        return [place // ALIGNMENT_BYTES + 1 for place in self.places]  # NOWHERE gives 0

    def add(self, block: int, place: int, extent: Extent | None) -> None:
        self.blocks.append(block)
        self.places.append(place)
        self.extents.append(extent)
        if extent is not None:
            self.use.extents.append(extent)

    def add_run(self, blocks: Sequence[int], extent: Extent, slot_bytes: int) -> None:
        """Add blocks in consecutive slots from the extent's first byte."""
        extents = [extent] * len(blocks)
        self.blocks += blocks
        self.places += range(extent.offset, extent.offset + len(blocks) * slot_bytes, slot_bytes)
        self.extents += extents
        self.use.extents += extents


class PendingOutcomes:
    """The blocks that were sent and must be sent again, with patience for other clients, block by block.

    Invariant: an orphan is sent again only while the outcome of a block before it is pending. `gave_up`: another client
    was writing a block for longer than `PENDING_PATIENCE_S`.
    """

    def __init__(self) -> None:
        self._blocks: set[int] = set()
        self._other_client_since: dict[int, float] = {}  # of these, those that another client is writing
        self.gave_up = False

    def refused(self, blocks: Iterable[int]) -> None:
        """Note that the daemon has not looked at these blocks: all of them must be sent again."""
        self._blocks.update(blocks)

    def answered(self, blocks: Sequence[int], statuses: bytes, now: float, deadline: float) -> list[int]:
        """Return the positions in `blocks` that must be sent again; the others are decided."""
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
