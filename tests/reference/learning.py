"""Carries what policies and a predictor learned in a file of a test's own, without a process."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvstored.clock import ManualClock
from kvstored.state.learned import LearnedTables
from kvstored.state.step_runner import StepRunner
from kvstored.store.blocks import Residency
from kvstored.store.policies import EvictionPolicy, create, create_empty
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.telemetry import Counters

FILE = "learned"
Entry = tuple[bytes, bytes]


def no_prefetch() -> PrefetchState:
    return PrefetchState(GuardedPredictor(None), RecentRequests(), PrefetchCredit(0.2, 0.5, 1, Counters()))


class Collected:
    """A transaction of a database of a dictionary."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    async def put(self, database: str, entries: Iterable[Entry]) -> None:
        assert database == "learned"
        self.entries.update(entries)

    async def keep_only(self, database: str, keys: Iterable[bytes]) -> None:
        kept = set(keys)
        self.entries = {key: value for key, value in self.entries.items() if key in kept}


def learned_of(
    residency: Residency,
    clock: ManualClock,
    policies: Sequence[EvictionPolicy] = (),
    prefetch: PrefetchState | None = None,
) -> tuple[LearnedTables, list[EvictionPolicy]]:
    """Return what saves and hands out for these, and the policies, which `hand_out` replaces."""
    found = [*policies, *[create("lru", residency, tier) for tier in range(len(policies), len(residency.tiers))]]

    def renew(position: int, *, is_empty: bool) -> EvictionPolicy:
        assert is_empty
        return create_empty(found[position].name, residency, position)

    store: Any = SimpleNamespace(
        residency=residency, clock=clock, policies=found, prefetch_state=prefetch or no_prefetch(), counters=Counters(),
        renew_policy=renew, follow_policy=found.__setitem__,
    )  # fmt: skip
    return LearnedTables(store), found


def hand_out(learned: LearnedTables, *, renew: bool) -> None:
    asyncio.run(learned.hand_out(StepRunner(), renew=renew))


def keep(place: Path, learned: LearnedTables) -> bytes:
    """Save; return all that is saved."""
    change: Any = Collected()
    asyncio.run(learned.put(change, StepRunner()))
    (place / FILE).write_bytes(pickle.dumps(sorted(change.entries.items())))
    return b"".join(key + value for key, value in change.entries.items())


def kept(place: Path) -> list[Entry]:
    found: list[Entry] = pickle.loads((place / FILE).read_bytes())
    return found
