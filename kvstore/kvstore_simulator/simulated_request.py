"""Requests on their way through a simulated node, and the node's record: its requests, its compute, and samples of the
contents of its tiers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from kvstore_simulator.trace import Op
from kvstored.clock import NS_PER_S
from kvstored.store.policies import EvictionPolicy, ResidencyClass


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """A request in a simulated node, with its record. Times are in virtual time. Of its `blocks`, `in_pool` were in the
    engine's memory, and `found[position]` in the store's tier at each position. `recomputed` blocks were in the store
    but were computed again, because that was faster.
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
        """The number of blocks of the request that did not have to be computed."""
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
        """The nanoseconds by which loading blocks, or computing stored blocks again, delayed the first token."""
        return self.end_ns - self.begin_ns - self.overhead_ns - self.prefill_ns


@dataclass(slots=True)
class Sample:
    """The number of blocks in a tier at one time, divided into three classes by how soon the tier's policy expects the
    blocks to be needed.
    """

    at_s: float
    tier: str
    hot: int
    warm: int
    cold: int


@dataclass(slots=True)
class Served:
    """The record of all that a simulated node has done. `refused` is the number of requests that are longer than the
    engine's memory. `streamed_bytes` are the bytes that computing moved from the engine's memory into SRAM. `lasted_s`
    is the time of the last first token of an answer.
    """

    requests: list[SimulatedRequest] = field(default_factory=list)
    refused: int = 0
    lasted_s: float = 0.0
    compute_busy_s: float = 0.0
    streamed_bytes: float = 0.0
    largest_queue: int = 0
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for each in self.rounds for sample in each]

    def thin(self) -> None:
        """Drop every second entry of `rounds`, the samples of the tiers' contents, to use less memory. The first one is
        kept.
        """
        self.rounds = self.rounds[::2]

    def sample(self, held: Iterable[tuple[str, EvictionPolicy]], now_ns: int) -> None:
        """Record how many blocks each tier holds at `now_ns`, divided into the classes of the tier's policy. `held` has
        each tier's name and policy.
        """
        found: list[Sample] = []
        self.rounds.append(found)
        for name, policy in held:
            counts = policy.class_counts(now_ns)
            hot, warm, cold = counts[ResidencyClass.HOT], counts[ResidencyClass.WARM], counts[ResidencyClass.COLD]
            found.append(Sample(round(now_ns / NS_PER_S, 3), name, hot, warm, cold))
