"""Decides what each step computes.

The module owns the parts of scheduling: the waiting and running sequences (`run_queue`), the choice of tokens for a
step (`batch_planner`), preemption, compaction, and the statistics that policies read. It does not compute tokens.
Requests enter by `BatchEngine.add`, into `run_queue`.
"""

from collections.abc import Callable

from kvstore_engine.batching.batch import Batch
from kvstore_engine.batching.batch_planner import BatchPlanner
from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.policies import choose_policy
from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.run_queue import RunQueue
from kvstore_engine.batching.scheduling_statistics import SchedulingStatistics
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.batching.step_budget import StepBudget
from kvstore_engine.blocks.compaction import Compactor
from kvstore_engine.blocks.host_pool import HostPool
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.graph.step import StepLimits
from kvstore_restore.learned import LearnedCosts

_TIDY_STEPS = 8


class Scheduler:
    """The part of the engine that decides what each step computes. It joins the run queue, the planner of batches,
    preemption, compaction and the statistics of one engine.
    """

    def __init__(
        self,
        space: BlockSpace,
        restorer: Restorer,
        limits: StepLimits,
        settings: EngineSettings,
        *,
        costs: LearnedCosts,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        step_tokens = settings.step_tokens(limits)
        self.space = space
        self.host = HostPool(space.pool, settings.swap_bytes)
        self.statistics = SchedulingStatistics(costs, step_tokens, predicts=settings.policy == "shortest")
        self.preemption = Preemption(
            space, self.host, costs=costs, step_tokens=step_tokens, observer=observer, clock=clock
        )
        self.run_queue = RunQueue(
            space,
            choose_policy(settings.policy, ageing=settings.ageing, level_s=settings.level_s),
            self.statistics,
            self.preemption,
            restorer,
            places=min(settings.max_running, limits.max_sequences),
            observer=observer,
            clock=clock,
        )
        self._budget = StepBudget(
            costs,
            stretch=settings.step_stretch,
            most_stretch=settings.step_most_stretch,
            floor_s=settings.step_floor_s,
            most_tokens=step_tokens,
            block_tokens=limits.block_tokens,
        )
        self.planner = BatchPlanner(
            space,
            self._budget,
            restorer,
            most_tokens=limits.max_tokens,
            selection=limits.selection,
            make_room=self.run_queue.make_room,
            observer=observer,
            clock=clock,
        )
        self._costs = costs
        self._compactor = Compactor(space, self.preemption.transfers, clock) if settings.compaction else None

    def next_batch(self) -> Batch:
        """Return the batch that the next step computes. It has no parts if nothing can be computed now."""
        return self.planner.plan(self.run_queue.decoding(), self.run_queue.prompts())

    def observe(self, batch: Batch, seconds: float, *, beside_loading: bool) -> None:
        """Learn for later plans that computing `batch` took `seconds`. `beside_loading` is True if blocks were loaded
        from the daemon meanwhile, which slows a step.
        """
        pieces = [(part.end - part.begin, part.begin) for part in batch.parts]
        self._costs.observe_batch(pieces, seconds, beside_loading=beside_loading)
        self._budget.observe(batch.decodes, batch.prefill_tokens, seconds)
        self.statistics.stepped(seconds, len(batch.decodes))

    def tidy(self, steps: int) -> None:
        """Do small pieces of maintenance after step number `steps`. Every eighth step may return unused host memory to
        the system, and move together the blocks of the sequence that would be swapped out next.
        """
        if steps % _TIDY_STEPS == 0:
            self.host.trim_if_unused()
            victim = self.run_queue.next_to_yield() if self._compactor is not None else None
            if self._compactor is not None and victim is not None and not victim.is_restoring:
                self._compactor.compact(victim.held, self.preemption.expected_transfers)
        if not self.run_queue.has_sequences:
            self.host.trim()
