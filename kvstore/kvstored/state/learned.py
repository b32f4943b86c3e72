"""The tables that outlive the daemon: what policies and the predictor have learned, and why blocks left the store.

The tables name blocks by their keys, and tenants by their names in the index. A block that was deleted by order is in
no table that is copied later. Saved times are monotonic; the table `:clock` has the wall clock minus the monotonic
clock, which begins anew when the machine starts.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence

import numpy as np

from kvstore_predictor.base import Array, Piece, within
from kvstored.state.process import Transaction
from kvstored.state.renewal import Renewal
from kvstored.state.step_runner import StepRunner
from kvstored.state.tables import Contents, packed, tables_in
from kvstored.store.assembly import Store
from kvstored.store.policies import EvictionPolicy, Learns, Origin, Share
from kvstored.store.prefetch.guarded_predictor import PrefetchState

log = logging.getLogger(__name__)
_GHOSTS, _TENANTS, _CLOCK, _PREFETCH = ":ghosts:", ":tenants", ":clock", ":prefetch"
Entry = tuple[bytes, bytes]


class LearnedTables:
    """A component that saves what the policies and the predictor of one store have learned, and why blocks were
    removed. Call `read`, then `hand_out`, then `put` any number of times."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._tables: dict[str, Array] = {}  # what was read, until those who learn have it
        self._origin = Origin(np.empty(0, np.int64), 0, 0)

    # What was saved

    def read(self, entries: Sequence[Entry], tenants: Collection[str]) -> None:
        """Read the saved tables from `entries`. `tenants` are tenants of the index without blocks that the tables may
        name. Tables of another version are logged and not used.
        """
        try:
            self._tables = tables_in(entries)
            if self._tables:
                self._origin = self._read_origin(tenants)
                self._restore_ghosts()
        except Exception as error:  # a table of another version raises nearly any
            log.warning("what was learned is of another version (%s): it begins anew", error)
            self._tables = {}

    async def hand_out(self, steps: StepRunner, *, renew: bool) -> None:
        """Give the policies and the predictor the tables that were read, one step at a time by `steps`. With `renew`,
        also make a new policy for each tier without a table; it learns from the order in which blocks were used."""
        tables, self._tables = self._tables, {}
        store = self._store
        for position, tier in enumerate(store.residency.tiers):
            kept = within(tables, f"{tier}/")
            if kept or renew:
                await self._renew(position, kept, steps)
        if store.prefetch_state.works:
            self._import(_PREFETCH, store.prefetch_state, within(tables, f"{_PREFETCH}/"))

    async def _renew(self, position: int, kept: dict[str, Array], steps: StepRunner) -> None:
        """Replace the policy of a tier by a new one, which continues from the tables `kept`."""
        store = self._store
        former, policy = store.policies[position], store.renew_policy(position, is_empty=True)
        await Renewal(store.residency, policy).run(steps)
        if store.policies[position] is not former:
            return  # an operator has changed it meanwhile
        for tenant in {*policy.shares, *former.shares}:
            policy.set_share(tenant, former.shares.get(tenant, Share()))
        store.residency.listen(position, policy)
        self._import(store.residency.tiers[position], policy, kept)
        store.follow_policy(position, policy)

    def _import(self, group: str, learner: EvictionPolicy | PrefetchState, kept: dict[str, Array]) -> None:
        names = sorted({name.partition("/")[0] for name in kept})
        try:
            if kept:
                if learner.name not in names or not isinstance(learner, Learns | PrefetchState):
                    raise ValueError(f"{learner.name} cannot use it")
                learner.import_state(within(kept, f"{learner.name}/"), self._origin)
        except Exception as error:  # a damaged table raises nearly any
            place, learned_by = group.removeprefix(":"), ", ".join(names)
            log.warning("%s: what %s learned is not used: %s", place, learned_by, error)

    def _read_origin(self, tenants: Collection[str]) -> Origin:
        residency, clock = self._store.residency, self._store.clock
        known = {index.name for index in residency.tenants}.union(tenants)
        names = [name.decode() for name in self._tables[_TENANTS].tolist()]
        numbers = [residency.tenant(name) if name in known else -1 for name in names]
        later_ns = int(self._tables[_CLOCK][0]) - self._ahead_ns()
        return Origin(np.array(numbers, np.int64), later_ns, clock.monotonic_ns())

    def _restore_ghosts(self) -> None:
        for number, tenant in enumerate(self._origin.tenants.tolist()):
            ghosts = self._tables.get(f"{_GHOSTS}{number}")
            if ghosts is not None and tenant >= 0:
                self._store.residency.tenants[tenant].ghost.restore(ghosts, self._origin.later_ns)

    def _ahead_ns(self) -> int:
        """Return the wall clock minus the monotonic clock, in nanoseconds."""
        return self._store.clock.wall_ns() - self._store.clock.monotonic_ns()

    # What is saved

    def activity(self) -> tuple[int, ...]:
        """Return a tuple of counts that changes whenever a policy or the predictor may have learned something."""
        store = self._store
        requests = store.counters["acquires"] + store.counters["stored_blocks"]
        return requests, store.residency.changes, store.prefetch_state.hints

    async def put(self, change: Transaction, steps: StepRunner) -> Contents:
        """Put all learned tables into the transaction `change`, one step at a time by `steps`, and remove all other
        entries of the database. Return the list of the tables' pieces."""
        contents, entries = Contents(), self._entries()
        while (entry := await steps.run_one(lambda: next(entries, None))) is not None:
            await change.put("learned", [contents.add(*entry)])
        await change.put("learned", [contents.end()])
        await change.keep_only("learned", contents.keys)
        return contents

    def _learners(self) -> Iterator[tuple[str, EvictionPolicy | PrefetchState]]:
        """Yield each policy, and the predictor, with its group of tables. The predictor is left out when prefetch is
        off or has failed."""
        store = self._store
        yield from zip(store.residency.tiers, store.policies, strict=True)
        if store.prefetch_state.works:
            yield _PREFETCH, store.prefetch_state

    def _entries(self) -> Iterator[tuple[str, bytes]]:
        for name, piece in self._pieces():
            yield name, packed(piece)

    def _pieces(self) -> Iterator[Piece]:
        residency = self._store.residency
        for group, learner in self._learners():
            for name, piece in learner.export_state() if isinstance(learner, Learns | PrefetchState) else ():
                yield f"{group}/{learner.name}/{name}", piece
        remembered = []
        for number, index in enumerate(residency.tenants):
            kept = index.blocks
            for piece in index.ghost.copied():
                kept += len(piece)
                yield f"{_GHOSTS}{number}", piece
            is_gone = not kept and len(index.ghost) > 0  # all of it went by order, and so does its name
            remembered.append(b"" if is_gone else index.name.encode())
        yield _CLOCK, np.array([self._ahead_ns()])
        yield _TENANTS, np.array(remembered, "S")
