"""Puts the parts of an engine together.

Owns which part gets which other and the sizes that tie them. It never runs anything.
"""

from collections.abc import Callable

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.planning import StepPlanner
from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restoring import Restorer
from kvstore_engine.batching.roster import Roster
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.batching.standings import Standings
from kvstore_engine.batching.storing import Storer
from kvstore_engine.blocks import BlockSpace, Compactor, HostPool, TransferCosts
from kvstore_engine.graph.step import StepLimits
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore import CostModel
from kvstore_engine.restore.fetching import Fetcher
from kvstore_engine.scheduler import Admission, StepBudget, choose_policy


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
        self.standings = Standings(costs, most_tokens, predicts=settings.policy == "shortest")
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
        self.roster = Roster(
            self.space,
            choose_policy(settings.policy, ageing=settings.ageing, level_s=settings.level_s),
            self.standings,
            self.preemption,
            self.restorer,
            places=min(settings.max_running, limits.max_sequences),
            admitted=admitted,
            clock=clock,
        )
        self.planner = StepPlanner(
            self.space, self.budget, most_tokens=limits.max_tokens, make_room=self.roster.make_room, found=found
        )

    def close(self) -> None:
        """Store what was offered, and stop the threads."""
        self.storer.close()
        self.fetcher.close()
