"""Puts the parts of an engine together.

Owns which part gets which other and the sizes that tie them. It never runs anything.
"""

from collections.abc import Callable

from kvstore_engine.batching.batch_planner import BatchPlanner
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.run_queue import RunQueue
from kvstore_engine.batching.scheduling_statistics import SchedulingStatistics
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.batching.storer import Storer
from kvstore_engine.blocks import BlockSpace, Compactor, HostPool, TransferCosts
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.policies import Admission, StepBudget, choose_policy
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore import CostModel
from kvstore_engine.restore.fetcher import Fetcher


class EngineParts:
    """What a `BatchEngine` drives. `found` and `admitted` are its own ears."""

    def __init__(
        self,
        pool: BlockPool,
        limits: StepLimits,
        settings: EngineSettings,
        *,
        costs: CostModel,
        observer: Observer,
        clock: Callable[[], float],
        found: Callable[[Sequence, int], None],
        admitted: Callable[[Sequence, float], None],
    ) -> None:
        block = pool.block_tokens
        most_tokens = min(settings.prefill_tokens, limits.max_tokens) // block * block
        if most_tokens < block:
            raise ValueError(f"a step takes {limits.max_tokens} tokens: too few for one block of {block}")
        self.space = BlockSpace(pool, sharing=settings.prefix_sharing)
        self.host = HostPool(pool, settings.swap_bytes)
        self.transfers = TransferCosts()
        self.compactor = Compactor(self.space, self.transfers, clock)
        self.admission = Admission(settings.max_queued, settings.max_queue_s)
        self.statistics = SchedulingStatistics(costs, most_tokens, predicts=settings.policy == "shortest")
        self.budget = StepBudget(
            costs,
            stretch=settings.step_stretch,
            most_stretch=settings.step_most_stretch,
            floor_s=settings.step_floor_s,
            most_tokens=most_tokens,
            block_tokens=block,
        )
        self.fetcher = Fetcher(clock)
        self.restorer = Restorer(self.space, costs, step_tokens=most_tokens, fetcher=self.fetcher, clock=clock)
        self.storer = Storer(self.space, observer, clock)
        self.preemption = Preemption(
            self.space,
            self.host,
            costs=costs,
            transfers=self.transfers,
            step_tokens=most_tokens,
            observer=observer,
            clock=clock,
        )
        self.run_queue = RunQueue(
            self.space,
            choose_policy(settings.policy, ageing=settings.ageing, level_s=settings.level_s),
            self.statistics,
            self.preemption,
            self.restorer,
            places=min(settings.max_running, limits.max_sequences),
            admitted=admitted,
            clock=clock,
        )
        self.planner = BatchPlanner(
            self.space, self.budget, most_tokens=limits.max_tokens, make_room=self.run_queue.make_room, found=found
        )

    def close(self) -> None:
        """Store what was offered, and stop the threads."""
        self.storer.close()
        self.fetcher.close()
