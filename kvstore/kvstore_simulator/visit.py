"""A request on its way through a simulated node: what it asked for, where its blocks were, and when things happened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from kvstore_simulator.trace import Op


@dataclass(slots=True, eq=False)
class Visit:
    """Times are the virtual clock's. Of `blocks`, `in_pool` were in the engine's memory and `found[position]` in
    each of the store's tiers; of those in the store, `recomputed` were computed again because that was faster.
    """

    number: int
    tenant: int
    keys: list[bytes]
    tokens: int
    op: Op
    arrival_ns: int
    kind: str = "request"
    answer_tokens: int = 0
    begin_ns: int = 0
    end_ns: int = -1  # -1: not served
    prefill_ns: int = 0  # computing what was not stored
    in_pool: int = 0
    found: list[int] = field(default_factory=list)
    recomputed: int = 0
    given_up: int = 0  # of those: not loaded in time
    overhead_ns: int = 0

    # While it is on its way
    rows: list[int] | None = None  # of the pool, held
    leases: list[int] = field(default_factory=list)  # of the store
    loading: asyncio.Task[None] | None = None
    answers: AsyncGenerator[object, None] | None = None  # that the task reads
    ready: list[bool] = field(default_factory=list)  # by block that was stored: its bytes are mapped, or computed
    fetched: dict[int, int] = field(default_factory=dict)  # by position of blocks that were prefetched for it: the tier
    on_device: dict[int, int] = field(default_factory=dict)  # by position of blocks in device memory: the tier
    is_loading: bool = False
    raced_s: float = 0.0  # spent on computing while blocks were loaded
    copied_ns: int = 0  # when the last copy to the engine that was begun ends
    is_near: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def blocks(self) -> int:
        return len(self.keys)

    @property
    def hits(self) -> int:
        """Blocks that did not have to be computed."""
        return self.in_pool + sum(self.found) - self.recomputed

    @property
    def is_served(self) -> bool:
        return self.end_ns >= 0

    @property
    def ttft_ns(self) -> int:
        return self.end_ns - self.arrival_ns

    @property
    def queued_ns(self) -> int:
        return self.begin_ns - self.arrival_ns

    @property
    def exposed_ns(self) -> int:
        """What bringing blocks back added, by loading or by computing them again."""
        return self.end_ns - self.begin_ns - self.overhead_ns - self.prefill_ns
