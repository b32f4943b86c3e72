"""Unary calls: the verbs of the stream, with the bytes in the message instead of in shared memory.

The stream's verbs do the work: a put is checked, stored and written through as any other, a get leases what it reads.
This module only moves the bytes in and out, and gives each key its status. Invariants: bytes go out only after the host
tier verified their checksum while a lease held them; a lease ends with its call, also when the caller hangs up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from itertools import takewhile

import numpy as np

from kvstore_proto.arena import Bytes, slot_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1 import unary_pb2 as unary
from kvstore_tiers.base import Outcome, Slot
from kvstore_tiers.segments import Segment
from kvstored.clients.codes import miss_reason, terms_of
from kvstored.clients.sessions import ClientSession
from kvstored.clients.staging import InlineBlocks
from kvstored.rpc.verbs import Verbs
from kvstored.rpc.verbs.naming import NamedBlocks
from kvstored.rpc.verbs.validate import payload_size
from kvstored.store.assembly import Store
from kvstored.store.operations.delete import Delete, Fate
from kvstored.store.operations.records import Offer

RETRY_AFTER_MS = 10
_KEY_OVERHEAD_BYTES = 48  # of an answer, a key: its status, its reason, itself, its payload's tag and length
_ANSWER_OVERHEAD_BYTES = 1024
_OF_STORE: dict[int, unary.KeyStatus.ValueType] = {
    pb.STORE_STATUS_STORED: unary.KEY_STATUS_STORED,
    pb.STORE_STATUS_PRESENT: unary.KEY_STATUS_PRESENT,
    pb.STORE_STATUS_NO_ROOM: unary.KEY_STATUS_NO_ROOM,
    pb.STORE_STATUS_OVER_QUOTA: unary.KEY_STATUS_OVER_QUOTA,
    pb.STORE_STATUS_DECLINED: unary.KEY_STATUS_DECLINED,
    pb.STORE_STATUS_ORPHANED: unary.KEY_STATUS_ORPHANED,
    pb.STORE_STATUS_AGAIN: unary.KEY_STATUS_PENDING,
}
_WORTH_ANOTHER_TRY = frozenset({unary.KEY_STATUS_NO_ROOM, unary.KEY_STATUS_OVER_QUOTA, unary.KEY_STATUS_PENDING})
_OF_FATE = {
    Fate.DELETED: unary.KEY_STATUS_DELETED,
    Fate.IN_USE: unary.KEY_STATUS_IN_USE,
    Fate.CONTINUED: unary.KEY_STATUS_CONTINUED,
}


class InlineCalls:
    """The handlers of unary calls, whose block bytes are in the messages. `message_bytes` bounds an answer."""

    def __init__(self, verbs: Verbs, delete: Delete, store: Store, *, message_bytes: int) -> None:
        self._verbs = verbs
        self._delete = delete
        self.is_traced = bool(store.config.traces.endpoint)  # then a call's spans are below its caller's
        self._residency, self._retention = store.residency, store.retention
        self._host = store.host
        self._completions = store.completions
        self._counters = store.counters
        self._message_bytes = message_bytes
        self._max_block_bytes = store.config.limits.max_block_bytes
        self._reading: set[asyncio.Task[list[tuple[Bytes, Outcome]]]] = set()

    def look_up(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryLookupRequest
    ) -> unary.UnaryLookupReply:
        key_set = pb.KeySet(
            group=blocks.group, keys=blocks.packed, match=request.match, window_blocks=request.window_blocks
        )
        found = self._quick(session, lookup=pb.Lookup(sets=[key_set])).lookup.sets[0]
        rows = self._served(session, blocks)
        present = [row >= 0 for row in rows]
        return unary.UnaryLookupReply(
            usable_blocks=found.usable_blocks,
            statuses=[unary.KEY_STATUS_PRESENT if here else unary.KEY_STATUS_MISS for here in present],
            miss_reasons=self._reasons(session, blocks, [not here for here in present]),
            tiers=[pb.TierCode.ValueType(code) for code in found.tiers],
            load_us=found.load_us,
            payload_bytes=[self._residency.payload_bytes(row) if row >= 0 else 0 for row in rows],
        )

    async def put(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryPutRequest
    ) -> unary.UnaryPutReply:
        if blocks.are_given:
            raise KVStoreError(
                ErrorKind.INVALID, "blocks are put by token_ids or by object: keys are the daemon's to make"
            )
        if len(request.payloads) != len(blocks):
            raise KVStoreError(
                ErrorKind.INVALID, f"{len(request.payloads)} payloads for {len(blocks)} blocks: one a block"
            )
        for payload in request.payloads:
            payload_size(session, blocks.group, len(payload), self._max_block_bytes)
            self._counters.add("grpc_payload_bytes", len(payload))
        offer = Offer(
            blocks.group, blocks.packed, blocks.keys, blocks.parents, blocks.extras, list(map(len, request.payloads)),
            InlineBlocks(blocks.tokens, request.payloads), range(len(blocks)), terms=terms_of(request.terms),
        )  # fmt: skip
        async with aclosing(self._verbs.store_inline(session, offer, request.durability)) as answers:
            async for answer in answers:
                stored = answer.store
                if request.answer_early:
                    break
        reply = unary.UnaryPutReply(
            statuses=[_OF_STORE.get(status, unary.KEY_STATUS_MISS) for status in stored.statuses],
            durability=[pb.Durability.ValueType(durability) for durability in stored.durability],
        )
        for position, (key, parent) in enumerate(zip(blocks.keys, blocks.parents, strict=True)):
            if key in (parent, NO_PARENT):
                reply.statuses[position] = unary.KEY_STATUS_REFUSED
        if not _WORTH_ANOTHER_TRY.isdisjoint(reply.statuses):
            reply.retry_after_ms = RETRY_AFTER_MS
        return reply

    async def get(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryGetRequest
    ) -> unary.UnaryGetReply:
        wanted = self._that_fit(session, blocks, request)
        acquired = pb.AcquireReply()
        images: list[tuple[Bytes, Outcome]] = []
        if wanted:
            key_set = pb.KeySet(group=blocks.group, keys=b"".join(blocks.keys[:wanted]))
            acquired = await self._acquire(session, pb.Acquire(set=key_set, max_wait_ms=request.max_wait_ms))
            reading = asyncio.create_task(self._read(session, blocks, acquired))
            self._reading.add(reading)  # it ends, and its lease with it, even when the caller has given up
            reading.add_done_callback(self._reading.discard)
            images = await asyncio.shield(reading)
        reply, errors = unary.UnaryGetReply(promoted_blocks=acquired.promoted_blocks), list[float]()
        for (payload, outcome), tokens in zip(images, blocks.tokens, strict=False):
            header = outcome.header
            if not outcome.ok or header is None or (tokens and header.tokens != tokens):
                break
            reply.payloads.append(payload.tobytes())
            errors.append(header.error)
            self._counters.add("grpc_payload_bytes", payload.nbytes)
            await asyncio.sleep(0)  # the copy held the GIL: let others go on between two of them
        sent = len(reply.payloads)
        reply.errors.extend(errors if any(errors) else ())
        rows = self._served(session, blocks)
        missing = [position >= sent and row < 0 for position, row in enumerate(rows)]
        omitted_or_missing = [unary.KEY_STATUS_MISS if miss else unary.KEY_STATUS_OMITTED for miss in missing[sent:]]
        reply.statuses.extend([unary.KEY_STATUS_SENT] * sent + omitted_or_missing)
        reply.miss_reasons.extend(self._reasons(session, blocks, missing))
        if sent < len(images):  # what is there is not what was asked for
            reply.statuses[sent] = unary.KEY_STATUS_MISS
            reply.miss_reasons[sent] = pb.MISS_REASON_CORRUPT
        return reply

    def prefetch(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryPrefetchRequest
    ) -> unary.UnaryPrefetchReply:
        residency = self._residency
        run = list(takewhile(lambda row: row >= 0, self._served(session, blocks)))
        mapped = [residency.has(row, residency.mapped) for row in run]
        key_set = pb.KeySet(group=blocks.group, keys=blocks.packed)
        asked = pb.Prefetch(set=key_set, budget_bytes=request.budget_bytes)
        left = self._quick(session, prefetch=asked).prefetch.scheduled_blocks
        reply = unary.UnaryPrefetchReply()
        missing = [row < 0 for row in self._served(session, blocks)]
        for position, miss in enumerate(missing):
            status = unary.KEY_STATUS_MISS if miss else unary.KEY_STATUS_OMITTED
            if position < len(run) and mapped[position]:
                status = unary.KEY_STATUS_PRESENT
            elif position < len(run) and left:
                status = unary.KEY_STATUS_SCHEDULED
                left -= 1
            reply.statuses.append(status)
        reply.miss_reasons.extend(self._reasons(session, blocks, missing))
        return reply

    def touch(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryTouchRequest
    ) -> unary.UnaryTouchReply:
        key_set = pb.KeySet(group=blocks.group, keys=blocks.packed)
        touched = self._quick(session, touch=pb.Touch(set=key_set, terms=request.terms)).touch.touched
        missing = [row < 0 for row in self._retention.find_each(session.tenant_id, blocks.packed)]
        behind = [unary.KEY_STATUS_MISS if miss else unary.KEY_STATUS_OMITTED for miss in missing[touched:]]
        return unary.UnaryTouchReply(
            statuses=[unary.KEY_STATUS_PRESENT] * touched + behind,
            miss_reasons=self._reasons(session, blocks, missing),
        )

    async def delete(
        self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryDeleteRequest
    ) -> unary.UnaryDeleteReply:
        session.require_writer()
        missing = [row < 0 for row in self._retention.find_each(session.tenant_id, blocks.packed)]
        reasons = self._reasons(session, blocks, missing)  # before the call's own deletions are among them
        deleted = await self._delete.delete(session, blocks.keys)
        return unary.UnaryDeleteReply(
            statuses=[_OF_FATE.get(fate, unary.KEY_STATUS_MISS) for fate in deleted.fates],
            miss_reasons=reasons,
            deleted_bytes=deleted.nbytes,
        )

    # Inside

    def _served(self, session: ClientSession, blocks: NamedBlocks) -> list[int]:
        """Return for every key the row of its block, or -1 where there is none that the caller may have."""
        masks = self._residency.exactness.masks(exact=session.exact)
        rows = self._retention.find_each(session.tenant_id, blocks.packed)
        return [row if row >= 0 and masks[row] else -1 for row in rows]

    def _quick(self, session: ClientSession, **op: object) -> pb.Response:
        """Return the answer of a verb that does not wait."""
        (name,) = op
        response = self._verbs.quick[name](session, pb.Request(**op))  # type: ignore[arg-type]  # one of its messages
        assert response is not None, f"{name} must run as a task"
        return response

    def _that_fit(self, session: ClientSession, blocks: NamedBlocks, request: unary.UnaryGetRequest) -> int:
        """Return how many leading blocks are here and fit into one answer. Raises KVStoreError if not even the first
        one fits.
        """
        room_bytes = self._message_bytes - _ANSWER_OVERHEAD_BYTES - _KEY_OVERHEAD_BYTES * len(blocks)
        limit_bytes = min(request.max_bytes or room_bytes, room_bytes)
        run = list(takewhile(lambda row: row >= 0, self._served(session, blocks)))[: request.max_blocks or None]
        used_bytes = 0
        for position, row in enumerate(run):
            payload_bytes = self._residency.payload_bytes(row)
            used_bytes += payload_bytes
            if used_bytes > limit_bytes:
                if position == 0:
                    raise KVStoreError(
                        ErrorKind.TOO_LARGE,
                        f"a block of {payload_bytes} bytes does not go into an answer of {max(limit_bytes, 0)} bytes; "
                        "raise max_bytes, or have unary.message raised",
                    )
                return position
        return len(run)

    async def _acquire(self, session: ClientSession, request: pb.Acquire) -> pb.AcquireReply:
        wrapped = pb.Request(acquire=request)
        held = self._verbs.quick["acquire"](session, wrapped)
        if held is None:
            async with aclosing(self._verbs.slow["acquire"](session, wrapped)) as answers:
                held = await anext(answers)
        return held.acquire

    async def _read(
        self, session: ClientSession, blocks: NamedBlocks, acquired: pb.AcquireReply
    ) -> list[tuple[Bytes, Outcome]]:
        """Return copies of the leased blocks, made and verified in the host tier's threads, with the outcome of each;
        then the lease ends.
        """
        loop = asyncio.get_running_loop()
        images: list[Bytes] = []
        outcomes: list[asyncio.Future[Outcome]] = []
        try:
            for position in range(acquired.blocks):
                payload_bytes = acquired.payload_bytes[position]
                slot = Slot(
                    acquired.arena_ids[position], acquired.offsets[position], slot_bytes(payload_bytes),
                    acquired.generations[position],
                )  # fmt: skip
                image = np.empty(payload_bytes, np.uint8)
                outcome: asyncio.Future[Outcome] = loop.create_future()
                into = Segment(int(image.ctypes.data), image.nbytes, owner=image)
                self._host.read(slot, blocks.keys[position], [into], self._completions.to_loop(outcome.set_result))
                images.append(image)
                outcomes.append(outcome)
            return list(zip(images, [await outcome for outcome in outcomes], strict=True))
        finally:
            self._quick(session, release=pb.Release(lease_ids=[acquired.lease_id]))

    def _reasons(
        self, session: ClientSession, blocks: NamedBlocks, missing: Sequence[bool]
    ) -> list[pb.MissReason.ValueType]:
        return [
            miss_reason(session.why_missing(self._residency, key)) if miss else pb.MISS_REASON_UNSPECIFIED
            for key, miss in zip(blocks.keys, missing, strict=True)
        ]
