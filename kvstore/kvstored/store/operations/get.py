"""Get: a lease on the leading run of a chain, promoting blocks that are not mapped, whole or in parts as blocks arrive.

A get finds the leading blocks that are stored and pins them (`Loading`), asks other stores for the next ones, promotes
blocks that its client does not read in place, and leases the blocks that have come. Invariants: a lease holds only
slots whose block is readable in a tier that the client reads; its rows are pinned from before the first wait; a get
that is cancelled, or whose client is gone, leaves no pin, and cancels queued promotions that no other get waits for."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from itertools import accumulate, groupby, takewhile
from operator import itemgetter

from kvstore_proto.identity import KEY_BYTES, split_keys
from kvstored.clock import NS_PER_MS
from kvstored.lifecycle import Cause
from kvstored.store.assembly import Store
from kvstored.store.blocks.runs import RowRun, SlotRun
from kvstored.store.operations.client import Client
from kvstored.store.operations.discovery import Discovery, Question
from kvstored.store.operations.loading import Loading
from kvstored.store.operations.records import Acquired, GetRequest, GrantedRun, Outlook
from kvstored.store.policies import Listens
from kvstored.store.prefetch.feed import MISSING_MAX
from kvstored.store.remote import DEADLINE_MS
from kvstored.store.transfer.promote import LEAST_PATIENCE_MS
from kvstored.tier_set import MEMBERS, ONLY, TierSet

_NOTHING: Counter[int] = Counter()  # was promoted for most gets; it is never changed


class Gets:
    """The operation that leases stored blocks to clients. `discovery` asks remote tiers for blocks that are not stored
    here."""

    def __init__(self, store: Store, discovery: Discovery) -> None:
        self._store = store
        self._exactness = store.residency.exactness
        self._residency, self._leases, self._promoter = store.residency, store.leases, store.promoter
        self._clock, self._counters, self._flows, self._feed = store.clock, store.counters, store.flows, store.feed
        self._retention, self._discovery = store.retention, discovery
        self.lease_ttl_ms = store.config.limits.lease_ttl_ms
        self._wait_ms = store.config.movement.acquire_wait_ms

    def acquire_mapped(self, client: Client, asked: GetRequest) -> Acquired | None:
        """Lease the requested blocks to `client` without waiting. Return None when a block must first be promoted or
        verified, or a remote tier be asked for one."""
        resident = rows = self._run(client, asked)
        mask, readable = self._exactness.masks(exact=client.exact), self._readable(client, asked)
        if not all(tiers & readable for tiers in {mask[row] for row in rows}):
            if not asked.mapped_only:
                return None
            rows = rows[: next(at for at, row in enumerate(rows) if not mask[row] & readable)]
        if self._store.dram_check.wanted(rows) or self._ask(client, asked, len(resident)) is not None:
            return None
        leased = self._residency.rows.run_of(rows)
        if rows:
            self._residency.pin_run(leased)
        return self._end(client, asked, leased, {}, resident)

    async def acquire(self, client: Client, asked: GetRequest) -> Acquired:
        """Promote the requested blocks that are not mapped, wait for them, and lease the leading blocks that arrived in
        time."""
        rows = self._run(client, asked)
        question = self._ask(client, asked, len(rows))
        loading = Loading(self._store, rows, self._readable(client, asked), exact=client.exact)
        leased: list[int] = []
        try:
            intact, until_ns, patience_ms = await self._begin(client, asked, loading, question)
            if not asked.mapped_only:
                worth_ns = self._clock.monotonic_ns() + patience_ms * NS_PER_MS
                await loading.wait(min(until_ns, worth_ns), for_all=True)
                if not loading.is_over:
                    self._counters.add("acquire_timeouts")
            if not client.closed:
                leased = loading.lease(range(next((at for at in range(intact) if not loading.is_mapped(at)), intact)))
        finally:
            loading.close()
        run = self._residency.rows.run_of(leased)
        return self._end(client, asked, run, loading.sources, loading.rows[:intact])

    async def acquire_in_order(
        self, client: Client, asked: GetRequest, held: int = 0
    ) -> AsyncGenerator[Outlook | GrantedRun | Acquired, None]:
        """Serve a get in parts. Yield an Outlook first, then a GrantedRun for each run of blocks that becomes readable,
        and at last an Acquired that says why the chain ends. Blocks left when the caller stops or the time is up are
        unpinned. The first `held` blocks are in the engine's own memory: their access is counted, and they are not
        loaded. Policies are notified of the request at the end, when its blocks are mapped."""
        began_ns, used, has_leased = self._clock.monotonic_ns(), None, False
        rows = self._run(client, asked)
        question = self._ask(client, asked, len(rows))
        loading = Loading(self._store, rows, self._readable(client, asked), exact=client.exact)
        outlook = Outlook([], [])
        try:
            # However slow: the caller computes meanwhile, and leaves when it is done.
            intact, until_ns, _ = await self._begin(client, asked, loading, question, held, outlook)
            leased, used = set(range(min(held, len(loading.rows)))), loading.tokens[:intact]
            self._feed.got(
                client.tenant_id, client.session_id, asked.keys, intact, asked.context, self._clock.monotonic_ns()
            )
            yield outlook
            while not loading.is_over and not client.closed:
                arrived = await loading.wait(until_ns)
                for _, places in groupby(enumerate(arrived), lambda each: each[1] - each[0]):
                    # A run ends where one is left out, or went while the run before was on its way to the client.
                    run = list(takewhile(loading.is_mapped, map(itemgetter(1), places)))
                    if not run:
                        continue
                    leased.update(run)
                    yield self._lease(
                        client,
                        asked,
                        self._residency.rows.run_of(loading.lease(run)),
                        run[0],
                        loading.sources,
                        began_ns,
                        continues=has_leased,
                    )
                    has_leased = True
                if not arrived and self._clock.monotonic_ns() >= until_ns:
                    self._counters.add("acquire_timeouts")
                    break
        finally:
            loading.close()
            if used is not None:
                left = next((at for at, token in enumerate(used) if self._residency.current(token) < 0), len(used))
                self._count_access(client, used[:left], asked, left, self._clock.monotonic_ns())
        found = next((at for at in range(len(loading.rows)) if at not in leased), len(loading.rows))
        self._counters.add("acquires")
        yield Acquired(found, self._cause(client, asked, found))

    def release(self, client: Client, lease_ids: Sequence[int]) -> int:
        """End the leases `lease_ids` of the client, and return how many of them existed and were the client's."""
        return sum(self._leases.release(client.session_id, lease_id) for lease_id in lease_ids)

    # What is there

    def _readable(self, client: Client, asked: GetRequest) -> TierSet:
        """Return the tiers that a client reads in place."""
        return self._residency.readable(asked.device_tiers_of(client))

    def _run(self, client: Client, asked: GetRequest) -> list[int]:
        """Return the leading blocks of the chain that are stored and can be reached."""
        rows = self._retention.find_run(client.tenant_id, asked.keys)
        return self._promoter.reachable_run(rows, exact=client.exact)

    def _ask(self, client: Client, asked: GetRequest, known: int) -> Question | None:
        """Ask for blocks that other processes may have stored after the first `known` blocks; return the question, if
        waiting pays."""
        if not self._discovery.is_possible:
            return None
        return self._discovery.ask(client, asked.keys, known, asked.group, asked.wait_ms(DEADLINE_MS), asked.parent)

    async def _begin(
        self,
        client: Client,
        asked: GetRequest,
        loading: Loading,
        question: Question | None,
        held: int = 0,
        outlook: Outlook | None = None,
    ) -> tuple[int, int, int]:
        """Verify the blocks of `loading` and begin to promote all but the first `held`; then do it with the blocks that
        the answer to `question` adds. Add the expected times to `outlook`. Return three numbers: how many blocks from
        the first on can be read, until when to wait for them (ns), and how many ms of waiting they are worth."""
        known = len(loading.rows)
        intact = await loading.verify(range(known))
        until_ns = self._clock.monotonic_ns() + asked.wait_ms(self._wait_ms) * NS_PER_MS

        def begin(first: int, end: int) -> int:
            if outlook is not None:
                rows, device_tiers = loading.rows[first:end], asked.device_tiers_of(client)
                ready_us = accumulate(self._promoter.estimate_us(rows, self._readable(client, asked)))
                outlook.add([self._residency.fastest(row, device_tiers) for row in rows], list(ready_us))
            elif asked.mapped_only:
                return 0
            positions = range(max(held, first), end)
            order = reversed(positions) if asked.from_back else positions
            return loading.begin(order, until_ns, one_by_one=outlook is not None)

        patience_ms = begin(0, intact)
        if question is not None and intact == known:
            intact += await self._add_found(client, asked, loading, question)
            patience_ms += begin(known, intact)
        return intact, until_ns, patience_ms

    async def _add_found(self, client: Client, asked: GetRequest, loading: Loading, question: Question) -> int:
        """Add the blocks that continue the chain of `loading`, once they are found; return how many of them can be
        had."""
        await self._discovery.wait(question, asked.wait_ms(DEADLINE_MS))
        rows, known = self._run(client, asked), len(loading.tokens)
        if [self._residency.token(row) for row in rows[:known]] != loading.tokens:
            return 0  # damage took one of them meanwhile
        return await loading.verify(loading.extend(rows[known:]))

    # Answering

    def _end(
        self, client: Client, asked: GetRequest, leased: RowRun, sources: dict[int, int], resident: Sequence[int]
    ) -> Acquired:
        """Lease the blocks `leased`, which are pinned and mapped, and count the request."""
        found = len(leased.rows)
        cause = self._cause(client, asked, found)
        self._counters.add("acquires")
        # Policies are notified once the answer is on its way: for 64 blocks that is a tenth of the client's wait.
        now_ns = self._clock.monotonic_ns()
        is_whole = not (asked.mapped_only and len(resident) > found)  # else a get may load the rest, and is the request
        note = partial(self._note, client, leased if is_whole else None, asked, found, now_ns)
        self._store.completions.later(note)
        run = self._lease(client, asked, leased, 0, sources) if found else None
        if not asked.mapped_only:
            return Acquired(found, cause, run)
        load_us = sum(self._promoter.estimate_us(resident, self._readable(client, asked)))
        return Acquired(found, cause, run, len(resident), load_us)

    def _note(self, client: Client, used: RowRun | None, asked: GetRequest, found: int, now_ns: int) -> None:
        """Notify policies of the use of `used`, if any, and the predictor of a get that found the first `found`
        blocks."""
        if used is not None:
            self._count_access(client, used, asked, found, now_ns)
        self._feed.got(client.tenant_id, client.session_id, asked.keys, found, asked.context, now_ns)

    def _cause(self, client: Client, asked: GetRequest, found: int) -> Cause | None:
        """Return why the block after the first `found` is missing; None if it is there, or not wanted."""
        if found == asked.blocks:
            return None
        key = asked.keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
        row = self._residency.find(client.tenant_id, key)
        is_there = row >= 0 and not self._retention.is_expired(row)
        is_served = is_there and (not client.exact or bool(self._exactness.served_tiers(row)))
        if is_served and not self._promoter.is_out_of_reach(row):
            cause = self._no_room(row) if not asked.mapped_only else None
            if cause is None:
                return None
        else:  # where it is stored, but on a medium that is shed, reading it would fail
            cause = Cause.READ_FAILED if is_served else client.why_missing(self._residency, key)
        self._flows.missed(client, cause, asked.blocks - found)
        return cause

    def _no_room(self, row: int) -> Cause | None:
        """Return why the block at `row` got no room in DRAM; None if another reason kept it from there."""
        residency, promoter = self._residency, self._promoter
        if residency.has(row, residency.mapped):
            return None
        if not promoter.moves.lacks_room(residency.token(row), LEAST_PATIENCE_MS / 1000):
            return None
        is_over = promoter.room.is_over_quota(residency.tenant_of(row), residency.slot_bytes(row))
        return Cause.OVER_QUOTA if is_over else Cause.NO_ROOM

    def _lease(
        self,
        client: Client,
        asked: GetRequest,
        leased: RowRun,
        first: int,
        sources: dict[int, int],
        began_ns: int | None = None,
        *,
        continues: bool = False,
    ) -> GrantedRun:
        """Grant a lease over the blocks `leased`, which are pinned and mapped; the first is at position `first`. It
        names device memory if the client reads that, otherwise the mapped tier."""
        residency, rows = self._residency, leased.rows
        mapped = residency.mapped
        others = self._readable(client, asked).without(mapped)  # of most clients none
        if others:
            best, mask = self._exactness.best_tiers, residency.rows.mask
            choices = ((best(row) & others, mask[row] & ONLY[mapped], mask[row] & others) for row in rows)
            places = [next(MEMBERS[tiers][0] for tiers in each if tiers) for each in choices]
            slots = SlotRun.of([residency.slot(row, position) for row, position in zip(rows, places, strict=True)])
        else:
            slots = residency.slots(leased, mapped)
        now_ns = self._clock.monotonic_ns()
        expires_ns = now_ns + self.lease_ttl_ms * NS_PER_MS
        expires_in_ms = (expires_ns - (now_ns if began_ns is None else began_ns)) // NS_PER_MS
        lease = self._leases.grant(client.session_id, client.tenant_id, leased, slots, expires_ns, continues=continues)
        promoted, promoted_bytes = _NOTHING, 0
        if sources:
            came = [at for at in range(first, first + len(rows)) if at in sources]
            promoted = Counter([sources[at] for at in came])
            promoted_bytes = sum([slots.nbytes[at - first] for at in came])
        self._counters.add("acquired_blocks", len(rows))
        if asked.group == client.counted_group:
            self._counters.add("acquired_tokens", len(rows) * client.fingerprint.block_tokens)
        self._flows.found(client, len(rows))
        leased_in = {mapped: len(rows) - promoted.total()}
        if others:  # some may have been promoted past the mapped tier
            leased_in = Counter(place for at, place in enumerate(places, first) if at not in sources)
        for position, blocks in (*leased_in.items(), *promoted.items()):
            self._flows.hit(position, blocks)
        return GrantedRun(first, lease.lease_id, expires_in_ms, leased, slots, promoted, promoted_bytes)

    def _count_access(
        self, client: Client, used: Sequence[int] | RowRun, asked: GetRequest, found: int, now_ns: int
    ) -> None:
        """Count an access of the blocks that are still there, by a request that asked for others too."""
        residency = self._residency
        rows = residency.rows.still_there(used)
        missing = split_keys(asked.keys[found * KEY_BYTES : (found + MISSING_MAX) * KEY_BYTES])
        if missing and residency.find(client.tenant_id, missing[0]) >= 0:
            missing = []  # a block is there that just cannot be had
        if asked.context is not None and (rows or missing):
            for policy in self._feed.policies:
                is_asked = missing or any(residency.has(row, policy.tier) for row in rows)  # else another request's
                if is_asked and isinstance(policy, Listens):
                    policy.expect(asked.context)
        residency.request_run(client.tenant_id, rows, missing, now_ns, client.device_tiers)
