"""Get: a lease on the leading run of a chain, promoting what is not mapped, whole or in parts as blocks arrive.

Invariants: a lease holds only slots whose block is readable in the mapped tier; its rows are pinned from before the
first wait; a get that is cancelled, or whose client is gone, leaves no pin behind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from kvstore_proto.identity import KEY_BYTES, split_keys
from kvstore_tiers.base import Slot
from kvstored.clock import NS_PER_MS, Clock
from kvstored.lifecycle import Cause
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.store.operations.client import Client
from kvstored.store.operations.discovery import Question
from kvstored.store.operations.loader import Loader, Loading
from kvstored.store.policies import Listens, RequestContext
from kvstored.store.prefetch.feed import MISSING_MAX, Feed
from kvstored.store.remote.value import DEADLINE_MS
from kvstored.telemetry import Counters, Flows


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a get asks for. `keys` are packed, in chain order. `max_wait_ms` and `deadline_ms` bound the wait for
    promotions, 0: the daemon's own bound alone. `context`: what the engine says of the request, for policies.
    """

    keys: bytes
    max_wait_ms: int = 0
    deadline_ms: int = 0
    mapped_only: bool = False
    group: int = 0  # layer group
    from_back: bool = False
    context: RequestContext | None = None
    host_only: bool = False  # also of a client on a device

    @property
    def blocks(self) -> int:
        return len(self.keys) // KEY_BYTES

    def device_tiers_of(self, client: Client) -> int:
        """The tiers on the client's device that the lease may name, as a mask."""
        return 0 if self.host_only else client.device_tiers


@dataclass(frozen=True, slots=True)
class LeasedRun:
    """Blocks `first`, `first + 1`, … of a chain, readable now: one lease on their slots in the mapped tier. `promoted`:
    how many were read from which tier for this get. `expires_in_ms` counts from the start of a get in order, otherwise
    from now."""

    first: int
    lease_id: int
    expires_in_ms: int
    rows: Sequence[int]
    slots: Sequence[Slot]
    promoted: Counter[int] = field(default_factory=Counter)
    promoted_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Acquired:
    """The end of a get: `blocks` leading blocks are leased, in `run` unless they came in parts. `cause` says why the
    block after them is missing; None where none is. `resident_blocks` are here in all, and `load_us` is what loading
    them would take, where only mapped ones were wanted."""

    blocks: int
    cause: Cause | None
    run: LeasedRun | None = None
    resident_blocks: int = 0
    load_us: int = 0


@dataclass(frozen=True, slots=True)
class Expected:
    """Of each block that is resident: the fastest tier that has it, and in how many microseconds it is readable."""

    tiers: Sequence[int]
    ready_us: Sequence[int]

    def followed_by(self, more: Expected) -> Expected:
        """Of these blocks and of `more` after them, which is loaded beside them."""
        last_us = max(self.ready_us, default=0)
        return Expected([*self.tiers, *more.tiers], [*self.ready_us, *(max(last_us, each) for each in more.ready_us)])


@dataclass(frozen=True, slots=True)
class GetLimits:
    """`lease_ttl_ms` is what a new lease gets; `wait_ms` bounds every wait."""

    lease_ttl_ms: int
    wait_ms: int


class Get:
    """See the module."""

    def __init__(
        self,
        residency: Residency,
        leases: LeaseTable,
        loader: Loader,
        clock: Clock,
        counters: Counters,
        flows: Flows,
        feed: Feed,
        limits: GetLimits,
    ) -> None:
        self._residency = residency
        self._leases = leases
        self._loader = loader
        self._promoter, self._discovery = loader.promoter, loader.discovery
        self._clock = clock
        self._counters = counters
        self._flows = flows
        self._feed = feed
        self.limits = limits

    def acquire_mapped(self, client: Client, wanted: Wanted) -> Acquired | None:
        """The lease, when every block of the run is mapped already or only those are wanted; None when something must
        be promoted or verified first."""
        resident = rows = self._run(client, wanted)
        mask, readable = self._residency.rows.mask, self._readable(client, wanted)
        mapped = next((position for position, row in enumerate(rows) if not mask[row] & readable), len(rows))
        if mapped < len(rows):
            if not wanted.mapped_only:
                return None
            rows = rows[:mapped]
        if self._loader.dram_check.wanted(rows):
            return None
        if self._ask(client, wanted, len(resident)) is not None:
            return None
        self._residency.pin_run(rows)
        return self._end(client, wanted, rows, {}, resident)

    async def acquire(self, client: Client, wanted: Wanted) -> Acquired:
        """Promote what is not mapped, wait for it, and lease the leading blocks that made it."""
        rows = self._run(client, wanted)
        question = self._ask(client, wanted, len(rows))
        loading = self._loader.load(rows, self._readable(client, wanted))
        leased: list[int] = []
        try:
            intact = await self._loader.verify(rows, loading.tokens)
            until_ns = self._until_ns(wanted)
            patience_ms = 0 if wanted.mapped_only else loading.begin(range(intact), until_ns)
            if question is not None and intact == len(rows):
                rows += await self._found(client, wanted, loading, question)
                if not wanted.mapped_only:
                    patience_ms += loading.begin(range(intact, len(rows)), until_ns)
                intact = len(rows)
            if not wanted.mapped_only:
                await loading.wait(min(until_ns, self._clock.monotonic_ns() + patience_ms * NS_PER_MS), for_all=True)
                if not loading.is_over:
                    self._counters.add("acquire_timeouts")
            if not client.closed:
                leased = loading.lease(range(next((at for at in range(intact) if not loading.is_mapped(at)), intact)))
        finally:
            loading.close()
        return self._end(client, wanted, leased, loading.sources, rows[:intact])

    async def acquire_in_order(
        self, client: Client, wanted: Wanted, held: int = 0
    ) -> AsyncGenerator[Expected | LeasedRun | Acquired, None]:
        """What is to be expected, at once; then runs of blocks as they become readable; the last answer says why the
        chain ends. What is left when the time is up, or the caller stops, is given back.

        The first `held` blocks are in the engine's own memory: their access is counted, they are not loaded. Policies
        are notified at the end, when the blocks are in the mapped tier: before, that tier's policy would take a request
        for a whole chain for one of the blocks that were mapped.
        """
        began_ns, asked, has_leased = self._clock.monotonic_ns(), None, False
        rows = self._run(client, wanted)
        question = self._ask(client, wanted, len(rows))
        loading = self._loader.load(rows, self._readable(client, wanted))
        try:
            intact = await self._loader.verify(rows, loading.tokens)
            expected = self._expected(client, wanted, rows[:intact])
            until_ns = self._until_ns(wanted)  # however slow: the caller computes meanwhile, and leaves when it is done
            self._begin(loading, wanted, range(held, intact), until_ns)
            if question is not None and intact == len(rows):
                more = await self._found(client, wanted, loading, question)
                expected = expected.followed_by(self._expected(client, wanted, more))
                rows += more
                self._begin(loading, wanted, range(max(held, intact), len(rows)), until_ns)
                intact = len(rows)
            leased, asked = set(range(min(held, len(rows)))), loading.tokens[:intact]
            self._feed.got(
                client.tenant_id, client.session_id, wanted.keys, intact, wanted.context, self._clock.monotonic_ns()
            )
            yield expected
            while not loading.is_over and not client.closed:
                arrived = await loading.wait(until_ns)
                for run in _runs(arrived):
                    leased.update(run)
                    rows_of_run = loading.lease(run)
                    yield self._lease(
                        client, wanted, rows_of_run, run[0], loading.sources, began_ns, continues=has_leased
                    )
                    has_leased = True
                if not arrived and self._clock.monotonic_ns() >= until_ns:
                    self._counters.add("acquire_timeouts")
                    break
        finally:
            loading.close()
            if asked is not None:
                left = next((at for at, token in enumerate(asked) if self._residency.current(token) < 0), len(asked))
                self._count_access(client, asked[:left], wanted, left, self._clock.monotonic_ns())
        found = next((at for at in range(len(rows)) if at not in leased), len(rows))
        self._counters.add("acquires")
        yield Acquired(found, self._cause(client, wanted, found))

    def release(self, client: Client, lease_ids: Sequence[int]) -> int:
        """How many of these leases were the client's, and have ended now."""
        return sum(self._leases.release(client.session_id, lease_id) for lease_id in lease_ids)

    def leases_of(self, client: Client) -> int:
        return self._leases.count(client.session_id)

    def _readable(self, client: Client, wanted: Wanted) -> int:
        """The tiers that a client reads in place, as a mask."""
        return self._residency.readable(wanted.device_tiers_of(client))

    def _places(self, client: Client, wanted: Wanted, rows: Sequence[int]) -> list[int]:
        """The tier that a lease names for each block: device memory where the client reads that. Empty: the mapped tier
        for all, as most clients read no other."""
        mapped, mask = self._residency.mapped, self._residency.rows.mask
        others = self._readable(client, wanted) & ~(1 << mapped)
        if not others:
            return []
        on_device = [mask[row] & others for row in rows]
        return [(here & -here).bit_length() - 1 if here else mapped for here in on_device]

    def _until_ns(self, wanted: Wanted) -> int:
        most_ms = self.limits.wait_ms
        wait_ms = min(wanted.max_wait_ms or most_ms, wanted.deadline_ms or most_ms)
        return self._clock.monotonic_ns() + wait_ms * NS_PER_MS

    def _run(self, client: Client, wanted: Wanted) -> list[int]:
        """The leading blocks of the chain that are stored and can be reached."""
        return self._promoter.reachable_run(self._residency.find_run(client.tenant_id, wanted.keys))

    def _ask(self, client: Client, wanted: Wanted, known: int) -> Question | None:
        """The question for what other processes may have stored after the first `known` blocks, if waiting pays."""
        missing = wanted.blocks - known
        if not missing or self._discovery.declines(client, missing):
            return None
        return self._discovery.ask(client, wanted.keys, known, wanted.group, _question_ms(wanted))

    async def _found(self, client: Client, wanted: Wanted, loading: Loading, question: Question) -> list[int]:
        """The rows of blocks that continue those of `loading`, which has them from now on."""
        await self._discovery.wait(question, _question_ms(wanted))
        rows, known = self._run(client, wanted), len(loading.tokens)
        if [self._residency.token(row) for row in rows[:known]] != loading.tokens:
            return []  # damage took one of them meanwhile
        more = rows[known:]
        positions = loading.extend(more)
        intact = await self._loader.verify(more, [loading.tokens[at] for at in positions])
        return more[:intact]

    def _begin(self, loading: Loading, wanted: Wanted, order: range, until_ns: int) -> None:
        loading.begin(reversed(order) if wanted.from_back else order, until_ns)

    def _expected(self, client: Client, wanted: Wanted, rows: Sequence[int]) -> Expected:
        fastest, device_tiers = self._residency.fastest, wanted.device_tiers_of(client)
        return Expected(
            [fastest(row, device_tiers) for row in rows],
            list(accumulate(self._promoter.estimate_us(rows, self._readable(client, wanted)))),
        )

    def _end(
        self, client: Client, wanted: Wanted, rows: list[int], sources: dict[int, int], resident: Sequence[int]
    ) -> Acquired:
        """Lease `rows`, which are pinned and mapped, and count the request."""
        found = len(rows)
        cause = self._cause(client, wanted, found)
        self._counters.add("acquires")
        # Policies are notified once the answer is on its way: for 64 blocks that is a tenth of the client's wait.
        tokens = [self._residency.token(row) for row in rows]
        now_ns = self._clock.monotonic_ns()
        soon = asyncio.get_running_loop().call_soon
        if not (wanted.mapped_only and len(resident) > found):  # else a get may load the rest, and is the request
            soon(self._count_access, client, tokens, wanted, found, now_ns)
        soon(self._feed.got, client.tenant_id, client.session_id, wanted.keys, found, wanted.context, now_ns)
        run = self._lease(client, wanted, rows, 0, sources) if rows else None
        if not wanted.mapped_only:
            return Acquired(found, cause, run)
        return Acquired(
            found, cause, run, len(resident), sum(self._promoter.estimate_us(resident, self._readable(client, wanted)))
        )

    def _cause(self, client: Client, wanted: Wanted, found: int) -> Cause | None:
        """Why the block after the first `found` is missing; None where it is there, or not wanted."""
        if found == wanted.blocks:
            return None
        key = wanted.keys[found * KEY_BYTES : (found + 1) * KEY_BYTES]
        row = self._residency.find(client.tenant_id, key)
        if row >= 0 and not self._promoter.is_out_of_reach(row):
            return None
        # Where it is stored, but on a medium that is shed, reading it would fail.
        cause = client.why_missing(self._residency, key) if row < 0 else Cause.READ_FAILED
        self._flows.missed(client, cause, wanted.blocks - found)
        return cause

    def _lease(
        self,
        client: Client,
        wanted: Wanted,
        rows: list[int],
        first: int,
        sources: dict[int, int],
        began_ns: int | None = None,
        *,
        continues: bool = False,
    ) -> LeasedRun:
        """Grant a lease over `rows`, which are pinned and mapped; the first is at position `first`."""
        residency = self._residency
        tokens, places = [residency.token(row) for row in rows], self._places(client, wanted, rows)
        if places:
            slots = [residency.slot(row, position) for row, position in zip(rows, places, strict=True)]
        else:
            slots = residency.slots(rows, residency.mapped)
        now_ns = self._clock.monotonic_ns()
        expires_ns = now_ns + self.limits.lease_ttl_ms * NS_PER_MS
        expires_in_ms = (expires_ns - (now_ns if began_ns is None else began_ns)) // NS_PER_MS
        lease = self._leases.grant(client.session_id, client.tenant_id, tokens, slots, expires_ns, continues=continues)
        promoted: Counter[int] = Counter()
        promoted_bytes = 0
        if sources:
            for at, slot in enumerate(slots, first):
                if at in sources:
                    promoted[sources[at]] += 1
                    promoted_bytes += slot.nbytes
        self._counters.add("acquired_blocks", len(rows))
        self._flows.found(client, len(rows))
        if places:  # some may have been promoted past the mapped tier
            leased_in = Counter(place for at, place in enumerate(places, first) if at not in sources)
        else:
            leased_in = Counter({residency.mapped: len(rows) - promoted.total()})
        for position, blocks in (leased_in + promoted).items():
            self._flows.hit(position, blocks)
        return LeasedRun(first, lease.lease_id, expires_in_ms, rows, slots, promoted, promoted_bytes)

    def _count_access(self, client: Client, tokens: Sequence[int], wanted: Wanted, found: int, now_ns: int) -> None:
        """Count an access of those blocks that are still there, by a request that wanted others too."""
        residency = self._residency
        rows = [row for row in map(residency.current, tokens) if row >= 0]
        missing = self._missing(client, wanted, found)
        if wanted.context is not None and (rows or missing):
            for policy in self._feed.policies:
                is_asked = missing or any(residency.has(row, policy.tier) for row in rows)  # else another request's
                if is_asked and isinstance(policy, Listens):
                    policy.expect(wanted.context)
        residency.request_run(client.tenant_id, rows, missing, now_ns, client.device_tiers)

    def _missing(self, client: Client, wanted: Wanted, found: int) -> list[bytes]:
        """The keys of the request after the first `found`; none where a block is there that just cannot be had."""
        keys = split_keys(wanted.keys[found * KEY_BYTES : (found + MISSING_MAX) * KEY_BYTES])
        return keys if keys and self._residency.find(client.tenant_id, keys[0]) < 0 else []


def _question_ms(wanted: Wanted) -> int:
    return min(wanted.max_wait_ms or DEADLINE_MS, wanted.deadline_ms or DEADLINE_MS)


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Ascending positions, cut where one is left out."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return runs
