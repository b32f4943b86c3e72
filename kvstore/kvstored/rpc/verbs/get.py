"""Acquire and release on the wire."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import cache, partial

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.codes import miss_reason, tier_code
from kvstored.clients.sessions import Session
from kvstored.rpc.verbs.validate import keys_of, known_group
from kvstored.store.blocks import ResidencyView
from kvstored.store.operations.get import Acquired, Expected, Get, LeasedRun, Wanted
from kvstored.store.policies import RequestContext
from kvstored.telemetry import Counters, RecentMisses

log = logging.getLogger(__name__)


class AcquireVerb:
    """`max_keys` of a request and `leases_per_client` are limits that a request must keep."""

    def __init__(
        self,
        get: Get,
        residency: ResidencyView,
        misses: RecentMisses,
        counters: Counters,
        *,
        max_keys: int,
        leases_per_client: int,
    ) -> None:
        self._counters = counters
        self._get = get
        self._misses = misses
        self._max_keys = max_keys
        self._leases_per_client = leases_per_client
        self._residency = residency
        self._code = cache(partial(tier_code, residency))
        self._requests = 0

    def acquire_mapped(self, session: Session, request: pb.Acquire) -> pb.AcquireReply | None:
        """See `Get.acquire_mapped`."""
        held = self._get.acquire_mapped(session, self._wanted(session, request, 0))
        return None if held is None else self._reply(session, request, held)

    async def acquire(
        self, session: Session, request: pb.Acquire, deadline_ms: int
    ) -> AsyncGenerator[pb.Response, None]:
        """One answer, a lease on all that could be had in time. In an order: answers as blocks become readable, each a
        lease on one run of them, the last one without any, with the reason why the chain ends. The first one says what
        to expect, without a lease if all blocks must be loaded."""
        wanted = self._wanted(session, request, deadline_ms)
        if request.order == pb.ACQUIRE_ORDER_WHOLE:
            yield pb.Response(acquire=self._reply(session, request, await self._get.acquire(session, wanted)))
            return
        answers = self._get.acquire_in_order(session, wanted)
        expected = pb.AcquireReply()
        async with aclosing(answers):
            async for answer in answers:
                if isinstance(answer, Expected):
                    device_tiers = wanted.device_tiers_of(session)
                    tiers = bytes(self._code(position, device_tiers) for position in answer.tiers)
                    expected = pb.AcquireReply(tiers=tiers, ready_us=answer.ready_us)
                    if not answer.tiers or not {pb.TIER_CODE_HOST, pb.TIER_CODE_GPU}.isdisjoint(tiers):
                        continue  # another answer comes at once
                    reply = pb.AcquireReply(more=True)
                elif isinstance(answer, LeasedRun):
                    reply = pb.AcquireReply(first=answer.first, more=True)
                    self._enter(answer, reply)
                else:
                    reply = self._reply(session, request, answer)
                    reply.blocks = 0  # of this answer
                reply.MergeFrom(expected)
                expected = pb.AcquireReply()
                yield pb.Response(acquire=reply)

    def release(self, session: Session, request: pb.Release) -> pb.ReleaseReply:
        return pb.ReleaseReply(released=self._get.release(session, request.lease_ids))

    def undo(self, session: Session, reply: pb.AcquireReply) -> None:
        """Take back a lease of a reply that could not be sent."""
        self._get.release(session, [reply.lease_id])

    def _wanted(self, session: Session, request: pb.Acquire, deadline_ms: int) -> Wanted:
        """Raises KVStoreError for a request that is wrong as a whole, or one lease too many."""
        keys_of(request.set.keys, self._max_keys)
        known_group(session, request.set.group)
        if self._get.leases_of(session) >= self._leases_per_client:
            raise self._one_too_many(session)
        context = None
        if request.prompt_tokens:
            self._requests += 1
            context = RequestContext(self._requests, request.prompt_tokens)
        return Wanted(
            request.set.keys, request.max_wait_ms, deadline_ms, request.mapped_only, request.set.group,
            request.order == pb.ACQUIRE_ORDER_BACK, context, request.host_only,
        )  # fmt: skip

    def _one_too_many(self, session: Session) -> KVStoreError:
        most, ttl_s = self._leases_per_client, self._get.limits.lease_ttl_ms / 1000
        self._counters.add("lease_limit_refusals")
        if not session.is_over_leases:
            session.is_over_leases = True
            log.warning(
                "%s (pid %d) holds %d leases, limits.leases_per_client: its gets are throttled until it releases some "
                "or they expire, after %g s (said once)",
                session.client_name or "a client", session.peer.pid, most, ttl_s,
            )  # fmt: skip
        message = f"this client holds {most} leases, limits.leases_per_client: release some, or let them expire"
        return KVStoreError(ErrorKind.THROTTLED, message, 10)

    def _reply(self, session: Session, request: pb.Acquire, held: Acquired) -> pb.AcquireReply:
        reply = pb.AcquireReply(blocks=held.blocks, resident_blocks=held.resident_blocks, load_us=held.load_us)
        if held.cause is not None:
            keys = request.set.keys
            missing = keys[held.blocks * KEY_BYTES : (held.blocks + 1) * KEY_BYTES]
            reply.miss_reason = miss_reason(held.cause)
            self._misses.note("get", session, missing, held.cause, held.blocks, len(keys) // KEY_BYTES)
        if held.run is not None:
            self._enter(held.run, reply)
        return reply

    def _enter(self, run: LeasedRun, reply: pb.AcquireReply) -> None:
        """Enter a lease into a reply."""
        reply.blocks = len(run.rows)
        reply.lease_id = run.lease_id
        reply.expires_in_ms = run.expires_in_ms
        reply.arena_ids.extend([slot.container for slot in run.slots])
        reply.offsets.extend([slot.offset for slot in run.slots])
        reply.generations.extend([slot.generation for slot in run.slots])
        payload_bytes = self._residency.rows.payload_bytes
        reply.payload_bytes.extend([payload_bytes[row] for row in run.rows])
        reply.promoted_blocks = run.promoted.total()
        reply.promoted_bytes = run.promoted_bytes
