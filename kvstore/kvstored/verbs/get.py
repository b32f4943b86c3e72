"""Get: acquire a lease on the leading run of a chain, promoting what is not mapped, and release it.

Invariants: a lease holds only slots whose block is readable in the host tier; its rows are pinned from before the first
wait; a reply that nobody can receive any more leaves no lease behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from itertools import accumulate

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.identity import KEY_BYTES, split_keys
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.sessions import Session
from kvstored.clock import NS_PER_MS, NS_PER_S, Clock
from kvstored.lifecycle import Cause, miss_reason
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.store.policies import Policy, RequestContext
from kvstored.store.tiering import MAPPED, codes_by_mask
from kvstored.store.transfer.dram_check import DramCheck
from kvstored.store.transfer.lane import Priority
from kvstored.store.transfer.promote import Promoter
from kvstored.telemetry import Counters, Flows, RecentMisses
from kvstored.verbs.validate import keys_of, known_group

MISSING_MAX = 1024  # keys that policies are told of; they take up to a microsecond for each


class Get:
    """See the module. `lease_ttl_ms` is what a new lease gets; `wait_ms` bounds a wait that names no bound. `policies`
    hear how long a prompt is, if the engine says so."""

    def __init__(
        self,
        residency: Residency,
        leases: LeaseTable,
        promoter: Promoter,
        clock: Clock,
        counters: Counters,
        flows: Flows,
        misses: RecentMisses,
        dram_check: DramCheck,
        *,
        max_keys: int,
        leases_per_client: int,
        lease_ttl_ms: int,
        wait_ms: int,
        policies: Sequence[Policy] = (),
    ) -> None:
        self._policies = policies
        self._residency = residency
        self._leases = leases
        self._promoter = promoter
        self._clock = clock
        self._counters = counters
        self._flows = flows
        self._misses = misses
        self._dram_check = dram_check
        self._max_keys = max_keys
        self._leases_per_client = leases_per_client
        self._lease_ttl_ms = lease_ttl_ms
        self._wait_ms = wait_ms
        self._code_of_mask = codes_by_mask(residency)
        self._requests = 0

    def acquire_mapped(self, session: Session, request: pb.Acquire) -> pb.AcquireReply | None:
        """The lease, when every block of the run is mapped already or only those are wanted; None when something must
        be promoted or verified first."""
        resident = rows = self._run(session, request)
        mask = self._residency.rows.mask
        mapped = next((position for position, row in enumerate(rows) if not mask[row] >> MAPPED & 1), len(rows))
        if mapped < len(rows):
            if not request.mapped_only:
                return None
            rows = rows[:mapped]
        if self._dram_check.wanted(rows):
            return None
        self._residency.pin_run(rows)
        return self._told_rest(request, self._grant(session, request, rows, promoted={}), resident)

    def _told_rest(self, request: pb.Acquire, reply: pb.AcquireReply, resident: Sequence[int]) -> pb.AcquireReply:
        """Who asked for mapped blocks alone is told what loading all of them would take."""
        if request.mapped_only:
            reply.resident_blocks = len(resident)
            reply.load_us = sum(self._promoter.estimate_us(resident))
        return reply

    async def acquire(self, session: Session, request: pb.Acquire, deadline_ms: int) -> pb.AcquireReply:
        """Promote what is not mapped, wait up to `max_wait_ms` or the request's own deadline (0: none), and lease the
        leading blocks that made it."""
        residency = self._residency
        rows = self._run(session, request)
        tokens = [residency.token(row) for row in rows]
        residency.pin_run(rows)
        wanted: list[int] = []
        sources: dict[int, int] = {}  # by row: the tier that it is read from
        held = 0
        try:
            intact = await self._verify(rows, tokens)
            if not request.mapped_only:
                wanted = [row for row in rows[:intact] if not residency.has(row, MAPPED)]
                sources = {row: residency.fastest(row) for row in wanted}
            patience_ms = self._promoter.patience_ms(wanted)
            promotions = [self._promoter.promote(row, Priority.DEMAND) for row in wanted]
            if promotions:
                wait_ms = min(request.max_wait_ms or self._wait_ms, deadline_ms or self._wait_ms)
                _, late = await asyncio.wait(promotions, timeout=min(wait_ms, patience_ms) / 1000)
                if late:
                    self._counters.add("acquire_timeouts")
            if not session.closed:
                held = self._mapped_run(tokens[:intact])
        finally:
            residency.unpin_run(tokens[held:])
        leased = set(rows[:held])
        promoted = {row: source for row, source in sources.items() if row in leased}
        reply = self._grant(session, request, rows[:held], promoted)
        return self._told_rest(request, reply, rows[:intact])

    async def acquire_in_order(
        self, session: Session, request: pb.Acquire, deadline_ms: int
    ) -> AsyncGenerator[pb.AcquireReply, None]:
        """Answers as blocks become readable: each a lease on one run of them, the last one without any, with the reason
        why the chain ends. What is left when the time is up, or the caller goes, is given back."""
        residency = self._residency
        rows = self._run(session, request)
        tokens = [residency.token(row) for row in rows]
        residency.pin_run(rows)
        pinned = set(range(len(rows)))
        leased: set[int] = set()
        try:
            intact = await self._verify(rows, tokens)
            expected = self._expected(rows[:intact])
            positions = range(intact)
            loading: dict[asyncio.Future[bool], int] = {}
            sources: dict[int, int] = {}
            for position in reversed(positions) if request.order == pb.ACQUIRE_ORDER_BACK else positions:
                if not residency.has(rows[position], MAPPED):
                    sources[position] = residency.fastest(rows[position])
                    loading[self._promoter.promote(rows[position], Priority.DEMAND)] = position
            patience_ms = self._promoter.patience_ms([rows[position] for position in loading.values()])
            wait_ms = min(request.max_wait_ms or self._wait_ms, deadline_ms or self._wait_ms, patience_ms)
            until_ns = self._clock.monotonic_ns() + wait_ms * NS_PER_MS
            ready = sorted(set(positions) - set(loading.values()))
            while True:
                for run in _runs(self._still_mapped(tokens, ready)):
                    leased.update(run)
                    pinned.difference_update(run)
                    reply = pb.AcquireReply(blocks=len(run), first=run[0], more=True)
                    reply.MergeFrom(expected)
                    expected = pb.AcquireReply()  # with the first answer alone
                    self._lease(session, [rows[position] for position in run], reply)
                    self._count_promoted(reply, {rows[at]: sources[at] for at in run if at in sources})
                    yield reply
                if not loading or session.closed:
                    break
                left_s = max(0, until_ns - self._clock.monotonic_ns()) / NS_PER_S
                done, _ = await asyncio.wait(loading, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    self._counters.add("acquire_timeouts")
                    break
                ready = sorted(loading.pop(promotion) for promotion in done)
        finally:
            residency.unpin_run(tokens[position] for position in pinned)
        last = pb.AcquireReply()
        last.MergeFrom(expected)
        found = next((at for at in range(len(rows)) if at not in leased), len(rows))
        self._end_request(session, request, [tokens[at] for at in sorted(leased)], found, last)
        yield last

    def _expected(self, rows: Sequence[int]) -> pb.AcquireReply:
        """Where each block is, and in how long it will be readable."""
        ready_us = list(accumulate(self._promoter.estimate_us(rows)))
        code = self._code_of_mask
        return pb.AcquireReply(tiers=bytes(code[self._residency.tier_mask(row)] for row in rows), ready_us=ready_us)

    def _still_mapped(self, tokens: Sequence[int], positions: Sequence[int]) -> list[int]:
        current, has = self._residency.current, self._residency.has
        return [at for at in positions if (row := current(tokens[at])) >= 0 and has(row, MAPPED)]

    async def _verify(self, rows: Sequence[int], tokens: Sequence[int]) -> int:
        """Verify DRAM copies as far as the configuration asks for it; how many leading blocks can still be had. One
        that NVMe has too can, by promotion."""
        if not self._dram_check.wanted(rows):
            return len(rows)
        bad = await self._dram_check.verify(rows)
        for position, token in enumerate(tokens):
            row = self._residency.current(token)
            if row < 0 or (token in bad and self._residency.has(row, MAPPED)):
                return position
        return len(rows)

    def release(self, session: Session, request: pb.Release) -> pb.ReleaseReply:
        released = sum(self._leases.release(session.session_id, lease_id) for lease_id in request.lease_ids)
        return pb.ReleaseReply(released=released)

    def undo(self, session: Session, reply: pb.AcquireReply) -> None:
        """Take back a lease that its client will never hear of."""
        self._leases.release(session.session_id, reply.lease_id)

    def _run(self, session: Session, request: pb.Acquire) -> list[int]:
        keys_of(request.set.keys, self._max_keys)
        known_group(session, request.set.group)
        if self._leases.count(session.session_id) >= self._leases_per_client:
            raise KVStoreError(
                ErrorKind.THROTTLED, f"this client holds {self._leases_per_client} leases: release some", 10
            )
        return self._promoter.reachable_run(self._residency.find_run(session.tenant_id, request.set.keys))

    def _touch(
        self, tenant: int, tokens: Sequence[int], missing: Sequence[bytes], prompt_tokens: int, now_ns: int
    ) -> None:
        """Count an access of those blocks that are still there, by a request that wanted `missing` too."""
        rows = [row for row in map(self._residency.current, tokens) if row >= 0]
        if prompt_tokens and (rows or missing):
            self._requests += 1
            for policy in self._policies:
                if missing or any(self._residency.has(row, policy.tier) for row in rows):  # else another request's
                    policy.expect(RequestContext(self._requests, prompt_tokens))
        self._residency.request_run(tenant, rows, missing, now_ns)

    def _missing(self, session: Session, request: pb.Acquire, found: int) -> list[bytes]:
        """The keys of the request after the first `found`; none where a block is there that just cannot be had."""
        keys = split_keys(request.set.keys[found * KEY_BYTES : (found + MISSING_MAX) * KEY_BYTES])
        return keys if keys and self._residency.find(session.tenant_id, keys[0]) < 0 else []

    def _mapped_run(self, tokens: Sequence[int]) -> int:
        """How many leading blocks are (still) there and mapped."""
        for position, token in enumerate(tokens):
            row = self._residency.current(token)
            if row < 0 or not self._residency.has(row, MAPPED):
                return position
        return len(tokens)

    def _grant(
        self, session: Session, request: pb.Acquire, rows: list[int], promoted: Mapping[int, int]
    ) -> pb.AcquireReply:
        """The reply, with a lease over `rows`, which are pinned. `promoted`: the tier from which a row was read."""
        reply = pb.AcquireReply(blocks=len(rows))
        tokens = [self._residency.token(row) for row in rows]
        self._end_request(session, request, tokens, len(rows), reply)
        if rows:
            self._lease(session, rows, reply)
            self._count_promoted(reply, promoted)
        return reply

    def _end_request(
        self, session: Session, request: pb.Acquire, tokens: Sequence[int], found: int, reply: pb.AcquireReply
    ) -> None:
        """Say why the run of `found` blocks ends there, and count the request; `tokens` are what was leased."""
        residency = self._residency
        keys = len(request.set.keys) // KEY_BYTES
        if found < keys:
            missing = request.set.keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
            row = residency.find(session.tenant_id, missing)
            if row < 0 or self._promoter.is_out_of_reach(row):
                cause = Cause.READ_FAILED  # stored, but on a medium that is shed
                if row < 0:
                    cause = session.why_missing(residency, missing)
                reply.miss_reason = miss_reason(cause)
                self._flows.missed(session, cause, keys - found)
                self._misses.note("get", session, missing, cause, found, keys)
        self._counters.add("acquires")
        # The policy hears of it once the reply is on its way: for 64 blocks that is a tenth of the client's wait.
        lacking = self._missing(session, request, found)
        asyncio.get_running_loop().call_soon(
            self._touch, session.tenant_id, tokens, lacking, request.prompt_tokens, self._clock.monotonic_ns()
        )

    def _lease(self, session: Session, rows: Sequence[int], reply: pb.AcquireReply) -> None:
        """Grant a lease over `rows`, which are pinned and mapped, and enter it into `reply`."""
        residency = self._residency
        tokens, slots = [residency.token(row) for row in rows], residency.slots(rows, MAPPED)
        expires_ns = self._clock.monotonic_ns() + self._lease_ttl_ms * NS_PER_MS
        lease = self._leases.grant(session.session_id, session.tenant_id, tokens, slots, expires_ns)
        reply.lease_id = lease.lease_id
        reply.expires_in_ms = self._lease_ttl_ms
        reply.arena_ids.extend([slot.container for slot in slots])
        reply.offsets.extend([slot.offset for slot in slots])
        reply.generations.extend([slot.generation for slot in slots])
        payload_bytes = residency.rows.payload_bytes
        reply.payload_bytes.extend([payload_bytes[row] for row in rows])
        self._counters.add("acquired_blocks", len(rows))
        self._flows.found(session, len(rows))

    def _count_promoted(self, reply: pb.AcquireReply, promoted: Mapping[int, int]) -> None:
        """`promoted`: by row of the lease, the tier from which it was read."""
        reply.promoted_blocks = len(promoted)
        reply.promoted_bytes = sum(self._residency.slot(row, MAPPED).nbytes for row in promoted)
        self._flows.hit(MAPPED, reply.blocks - len(promoted))
        for position, blocks in Counter(promoted.values()).items():
            self._flows.hit(position, blocks)


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Ascending positions, cut where one is left out."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
