"""The mover wakes every lane where something may start now."""

from __future__ import annotations

import asyncio

from kvstore_tiers.base import Completion, Outcome, OutcomeKind
from kvstored.clock import ManualClock
from kvstored.completions import CompletionQueue
from kvstored.store.transfer.lane import Lane, LaneSettings, Priority
from kvstored.store.transfer.mover import LaneTransfer, Mover


def test_prefetch_goes_on_after_demand_of_a_neighbour_that_was_cancelled() -> None:
    async def main() -> list[str]:
        loop = asyncio.get_running_loop()
        lanes: list[Lane[LaneTransfer]] = [Lane(name, LaneSettings(quiet_s=0.0)) for name in ("read", "write")]
        for lane in lanes:
            lane.share_medium(lanes)
        mover = Mover(lanes, CompletionQueue(loop), ManualClock())
        begun: list[str] = []

        def transfer(name: str) -> LaneTransfer:
            def start(done: Completion) -> None:
                begun.append(name)
                done(Outcome(OutcomeKind.DONE))

            return LaneTransfer(start, lambda outcome: begun.append(outcome.kind.value))

        mover.submit("write", Priority.PREFETCH, 4096, transfer("prefetch"))
        loop.call_soon(lambda: mover.cancel("read", demand))  # between the turns of the two lanes
        demand = mover.submit("read", Priority.DEMAND, 4096, transfer("demand"))
        assert isinstance(demand, int)
        for _ in range(10):
            await asyncio.sleep(0)
        return begun

    assert asyncio.run(main()) == ["cancelled", "prefetch", "done"]
