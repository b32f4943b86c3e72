"""Replay: the requests of a trace against one tier of a given capacity, in virtual time.

The module drives the production Residency, Policy and Admission. A request looks up the leading run of its blocks that
are resident (these are its hits), then uses and stores all of its blocks, then the policy evicts down to the capacity.
A recorded get or put does what the daemon did: the get reports its missing blocks (or the put, if no get came first),
and the put makes room before it stores, neighbours of a chain together, unless the policy would rather keep the old
blocks. Causal: nothing here but the clairvoyant knows of a later request. The module counts blocks; `worth` converts
them to bytes and compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_proto.identity import NO_PARENT
from kvstore_simulator.engine_reports import EngineReports, hints_before, replay_hint
from kvstore_simulator.hints import NO_HINTS, HintOptions
from kvstore_simulator.policies import create
from kvstore_simulator.policies.clairvoyant import Clairvoyant, next_uses
from kvstore_simulator.trace import Op, Trace
from kvstore_tiers.base import Slot
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.lifecycle import Cause
from kvstored.policy_names import ALWAYS
from kvstored.store.blocks import Residency
from kvstored.store.blocks.index import DEFAULT_GHOST_KEYS
from kvstored.store.idle import idle_rows
from kvstored.store.policies import (
    EvictionPolicy,
    Learns,
    Listens,
    PolicySettings,
    RequestContext,
    Weighs,
    create_admission,
)
from kvstored.store.prefetch.feed import MISSING_MAX
from kvstored.store.remote import ComputeTimes
from kvstored.tier_set import TierSet

TIER = 0
_PROGRESS_EVERY = 512  # requests
_EXPIRED_AT_ONCE = 64
_TICK_NS = 1_000_000_000  # between two looks for what has expired, while no request comes;
_TICKS_MAX = 64  # and no more looks than this between two requests
_PART_BLOCKS = 64  # of a put are published together


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of one replay of a trace. `ttl_s` and `keep_worth` have their meaning in the daemon's configuration;
    None and 0 turn them off.
    """

    policy: str
    capacity_blocks: int
    admission: str = ALWAYS
    ttl_s: float | None = None
    ghost_keys: int = DEFAULT_GHOST_KEYS
    block_bytes: int = 1
    hints: HintOptions = NO_HINTS
    keep_worth: float = 0.0


@dataclass(slots=True)
class ReplayResult:
    """The counts of a replay of a trace, in blocks. `hits` has the number of found blocks for each request.
    `held_block_s` is the sum, over all requests, of the blocks in the tier times the seconds since the previous
    request.
    """

    settings: ReplaySettings
    hits: npt.NDArray[np.int64]
    held_block_s: npt.NDArray[np.float64]
    stored_blocks: int = 0
    evicted: dict[str, int] = field(default_factory=dict)  # by cause
    seconds: float = 0.0


class Replay:
    """A replay of a trace against one tier, with one eviction policy and one admission rule."""

    def __init__(self, trace: Trace, settings: ReplaySettings) -> None:
        self.trace = trace
        self.settings = settings
        self.clock = ManualClock()
        self.residency = Residency(("host",), ghost_keys=settings.ghost_keys)
        self._owed: list[Callable[[], None]] = []
        wanted = PolicySettings(settings.keep_worth, self._owed.append)
        self._ttl_ns = None if settings.ttl_s is None else round(settings.ttl_s * NS_PER_S)
        self._idle_look_ns = 0  # no copy is idle for too long before
        self._uses: list[int] = []
        if settings.policy == Clairvoyant.name:
            self.policy: EvictionPolicy = Clairvoyant(self.residency, TIER, wanted)
            self.residency.listen(TIER, self.policy)
            self._uses = next_uses(trace).tolist()
        else:
            self.policy = create(settings.policy, self.residency, TIER, wanted)
        self.admission = create_admission(settings.admission, self.residency, TIER, self.policy)
        self._compute = ComputeTimes()  # of recorded gets and puts
        self._stored = self._refused = self._evicted = self._expired = self._bypassed = 0
        self._slots: list[Slot] = []  # free
        self._slots_made = 0
        self._reports: EngineReports | None = None
        if isinstance(self.policy, Listens):
            self._reports = EngineReports(trace, settings.hints, self.policy, self.residency, self._tenant)

    def run(self, progress: Callable[[int, int], None] = lambda done, total: None) -> ReplayResult:
        """Replay the whole trace. It may be called once."""
        trace = self.trace
        hits: npt.NDArray[np.int64] = np.zeros(trace.requests, dtype=np.int64)
        held_block_s: npt.NDArray[np.float64] = np.zeros(trace.requests)
        keys = [trace.key(block) for block in range(trace.distinct_blocks)]
        times, tenants, ops, starts = (
            column.tolist() for column in (trace.times_ns, trace.tenants, trace.ops, trace.starts)
        )
        op_of = {int(op): op for op in Op}
        began = time.perf_counter()
        for at in range(trace.requests):
            if at % _PROGRESS_EVERY == 0:
                progress(at, trace.requests)
            first, last = starts[at], starts[at + 1]
            asked = [keys[block] for block in trace.blocks[first:last].tolist()]
            held_block_s[at] = self._replay_hints(at) if trace.hints else 0.0
            held_block_s[at] += self._pass_until(times[at] - times[0])
            now_ns = self.clock.set_ns(times[at] - times[0])
            if self._reports is not None:
                self._reports.begins(at, now_ns)
            hits[at] = self.request(
                asked, op_of[ops[at]], self._tenant(tenants[at]), now_ns, first, int(trace.input_tokens[at])
            )
        seconds = time.perf_counter() - began
        progress(trace.requests, trace.requests)
        evicted = {
            "evicted": self._evicted, "expired": self._expired, "refused": self._refused, "bypassed": self._bypassed,
        }  # fmt: skip
        return ReplayResult(self.settings, hits, held_block_s, self._stored, evicted, seconds)

    def _tenant(self, number: int) -> int:
        """Return the residency's number of a tenant of the trace: known from its first request on, as in the daemon."""
        return self.residency.tenant(f"tenant-{number}")

    def _pass_until(self, now_ns: int) -> float:
        """Let time go by, and blocks expire on the way; return the blocks held, times seconds."""
        then_ns, blocks = self.clock.monotonic_ns(), self.residency.tier_blocks(TIER)
        if self._ttl_ns is None and not self.settings.keep_worth:
            return blocks * (now_ns - then_ns) * 1e-9
        held, step_ns = 0, max(_TICK_NS, (now_ns - then_ns) // _TICKS_MAX)
        while then_ns < now_ns:
            last_ns, then_ns = then_ns, min(then_ns + step_ns, now_ns)
            held += self.residency.tier_blocks(TIER) * (then_ns - last_ns)
            if self._reports is not None:
                self._reports.ended(then_ns)
            self._expire(self.clock.set_ns(then_ns))
        return held * 1e-9

    def _replay_hints(self, at: int) -> float:
        """Replay the hints recorded before request `at`; return the blocks held meanwhile, times seconds."""
        trace, clock, held_block_s = self.trace, self.clock, 0.0
        first_ns = int(trace.times_ns[0])
        for hint in hints_before(trace, at):
            then_ns = min(max(hint.time_ns - first_ns, clock.monotonic_ns()), int(trace.times_ns[at]) - first_ns)
            held_block_s += self._pass_until(then_ns)
            replay_hint(hint, trace, self._tenant(hint.tenant), self.residency, (self.policy,), clock.set_ns(then_ns))
        return held_block_s

    def request(
        self, keys: list[bytes], op: Op, tenant: int, now_ns: int, first_access: int, prompt_tokens: int = 0
    ) -> int:
        """Replay one request for the blocks `keys`, and return how many leading blocks were hits. `first_access` is the
        number of its first block among all block accesses of the trace.
        """
        residency = self.residency
        self._expire(now_ns)
        rows = residency.find_keys(tenant, keys)
        if op != Op.REQUEST and not isinstance(self.policy, Clairvoyant):
            if op == Op.GET:
                if prompt_tokens and keys and isinstance(self.policy, Listens):
                    self.policy.expect(RequestContext(first_access, prompt_tokens))
                residency.pin_run(rows)  # the lease, which is given back before the next request
                residency.request_run(tenant, rows, keys[len(rows) :], now_ns)
                self.catch_up()
                for row in rows:
                    residency.unpin(row)
                if len(rows) < len(keys):
                    self._compute.missed(tenant, keys[len(rows)], now_ns)
                return len(rows)
            self._put(keys, len(rows), tenant, rows[-1] if rows else -1, now_ns)
            self.catch_up()
            return 0
        hits = 0 if op == Op.PUT else len(rows)
        missing = [] if op == Op.GET else keys[len(rows) :]
        stored = self._store(missing, tenant, rows[-1] if rows else -1, now_ns) if missing else []
        rows = stored if op == Op.PUT else rows + stored
        if rows:
            residency.touch_run(rows, now_ns)
        self.catch_up()
        if isinstance(self.policy, Clairvoyant):
            skipped = len(keys) - len(missing) if op == Op.PUT else 0
            first = first_access + skipped
            self.policy.foresee(rows, self._uses[first : first + len(rows)])
        if missing:
            refused = self._refuse(stored, now_ns) if self.settings.admission != ALWAYS else 0
            self._evict(now_ns)
            self._count(stored, refused)
        return hits

    def catch_up(self) -> None:
        """Do what the policy left for later: the daemon's event loop has its next turn."""
        while self._owed:
            self._owed.pop()()

    def _count(self, stored: list[int], refused: int) -> None:
        """Count the blocks that a request stored. Blocks that were evicted at once count as not stored (bypass)."""
        mask = self.residency.rows.mask
        kept = [mask[row] for row in stored].count(TierSet.of(TIER))
        bypassed = len(stored) - kept - refused
        self._stored += kept
        self._bypassed += bypassed
        self._evicted -= bypassed

    def _put(self, keys: list[bytes], present: int, tenant: int, parent: int, now_ns: int) -> None:
        """Store the blocks from `present` on, in the order in which the daemon's put and room do it."""
        if present == len(keys):
            return
        residency, policy = self.residency, self.policy
        is_reported = self._compute.put(tenant, keys[0], len(keys), now_ns)
        if not is_reported and not present:
            residency.request_run(tenant, [], keys[:MISSING_MAX], now_ns)
        if isinstance(policy, Learns):
            policy.arriving(tenant, parent, keys[present:], now_ns)
        filling: list[int] = []
        for depth in range(present, len(keys)):
            parent = residency.find_any(tenant, keys[depth - 1]) if depth else -1
            if residency.tier_blocks(TIER) >= self.settings.capacity_blocks:
                end = depth + _PART_BLOCKS - (depth - present) % _PART_BLOCKS
                refused = self._make_room(keys[depth:end], depth, tenant, parent, now_ns)
                if refused is not None:
                    for key in keys[depth:] if refused is Cause.DECLINED else ():
                        residency.record_refusal(tenant, key, refused, now_ns)
                        self._bypassed += 1
                    break
            filling.append(self._begin(keys, depth, tenant, now_ns))
        if filling:
            residency.publish_run(filling, TIER, now_ns)
        self._stored += len(filling)
        for first in range(0, len(filling), _PART_BLOCKS):
            residency.touch_run(filling[first : first + _PART_BLOCKS], now_ns)

    def _make_room(self, keys: list[bytes], depth: int, tenant: int, parent: int, now_ns: int) -> Cause | None:
        """Evict for the new blocks `keys`, the first of which is at `depth` after the row `parent`, neighbours of a
        chain together. Return None, or why the first one gets no room."""
        policy, weighs = self.policy, self.policy if isinstance(self.policy, Weighs) else None
        run = policy.next_victims(now_ns, len(keys))
        for at, row in enumerate(run):
            if row == parent or (weighs and weighs.declines(tenant, keys[at], depth + at, run[0], now_ns)):
                run = run[:at]
                break
        if not run:
            run = [policy.next_victim(now_ns, exclude=(parent,))]
            if run[0] < 0:
                return Cause.NO_ROOM
            if weighs and weighs.declines(tenant, keys[0], depth, run[0], now_ns):
                return Cause.DECLINED
        self._slots += self.residency.remove_run(run, TIER, Cause.EVICTED, now_ns)
        self._evicted += len(run)
        return None

    def _begin(self, keys: list[bytes], depth: int, tenant: int, now_ns: int) -> int:
        """Return a new row that is being filled."""
        row = self.residency.insert(
            tenant, keys[depth], keys[depth - 1] if depth else NO_PARENT, fingerprint_id=0, group=0, depth=depth,
            payload_bytes=self.settings.block_bytes, now_ns=now_ns,
        )  # fmt: skip
        if not self._slots:
            self._slots.append(Slot(0, self._slots_made, self.settings.block_bytes, 1))
            self._slots_made += 1
        self.residency.attach(row, TIER, self._slots.pop(), now_ns, filling=True)
        return row

    def _store(self, keys: list[bytes], tenant: int, parent: int, now_ns: int) -> list[int]:
        slots = self._slots
        while len(slots) < len(keys):
            slots.append(Slot(0, self._slots_made, self.settings.block_bytes, 1))
            self._slots_made += 1
        taken = slots[-len(keys) :]
        del slots[-len(keys) :]
        return self.residency.store_run(
            tenant, keys, parent, TIER, taken,
            fingerprint_id=0, group=0, payload_bytes=self.settings.block_bytes, now_ns=now_ns,
        )  # fmt: skip

    def _expire(self, now_ns: int) -> None:
        """Do what the daemon's `IdleCopies` does, for all blocks at once."""
        if self._ttl_ns is not None and now_ns >= self._idle_look_ns:
            for row in idle_rows(self.residency, TIER, slice(None), now_ns - self._ttl_ns):
                if self.residency.is_evictable(row, TIER):
                    self._take(row, Cause.EXPIRED, now_ns)
                    self._expired += 1
            self._idle_look_ns = min(now_ns, self._oldest_use_ns()) + self._ttl_ns
        while isinstance(self.policy, Weighs) and (rows := self.policy.below_keep_worth(now_ns, _EXPIRED_AT_ONCE)):
            for row in rows:
                self._take(row, Cause.EXPIRED, now_ns)
            self._expired += len(rows)

    def _oldest_use_ns(self) -> int:
        """Return when the block that was not used for longest was used last."""
        rows = np.flatnonzero(np.frombuffer(self.residency.copies[TIER].state, np.uint8))
        last_ns = np.frombuffer(self.residency.rows.last_access_ns, np.uint64)[rows]
        return int(last_ns.min()) if len(rows) else self.clock.monotonic_ns()

    def _refuse(self, stored: list[int], now_ns: int) -> int:
        """Remove the blocks that admission refuses, from the tail, so that an admitted child keeps its parents; return
        their number.
        """
        refused = 0
        for row in reversed(stored):
            if not self.admission.admit(row, now_ns) and self.residency.may_forget(row):
                self._take(row, Cause.EVICTED, now_ns)
                refused += 1
        self._refused += refused
        return refused

    def _evict(self, now_ns: int) -> None:
        over = self.residency.tier_blocks(TIER) - self.settings.capacity_blocks
        if over <= 0:
            return
        self._evicted += over
        while over:
            run = self.policy.next_victims(now_ns, over)
            if not run:
                raise RuntimeError(f"{self.settings.policy} names no victim, though nothing is pinned")
            self._slots += self.residency.remove_run(run, TIER, Cause.EVICTED, now_ns)
            over -= len(run)

    def _take(self, row: int, cause: Cause, now_ns: int) -> None:
        for taken in self.residency.remove(row, cause, now_ns):
            self._slots.append(taken.slot)
