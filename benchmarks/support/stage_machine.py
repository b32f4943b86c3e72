"""One request's restoration over pipeline stages in virtual time: each stage is a device with its compute and its link.

Drives the client's own plans, pointers and stages (`kvstore_restore`). A step of computing and a load are not
interrupted. While both run on a device, each goes on at its share of speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_restore.costs import RestoreCosts
from kvstore_restore.plan import Prefix, plan
from kvstore_restore.pointers import Pointers
from kvstore_restore.stages import Stages
from support.restore_machine import CAUTION

COMPUTE, KV, INPUT = "compute", "kv", "input"


@dataclass
class _Work:
    kind: str
    chunk: int
    left_s: float  # alone


class StageMachine:
    """`prefixes`, `costs`: of each stage, all chunks in one tier. `inputs_stored`: hidden states are stored at the
    boundaries, in memory or, where a prefix has `input_bytes`, behind the stage's link; else the stage before has to
    compute them.
    """

    def __init__(
        self, prefixes: Sequence[Prefix], costs: Sequence[RestoreCosts], *, inputs_stored: bool = True
    ) -> None:
        self._prefixes, self._costs = tuple(prefixes), tuple(costs)
        self._tier = prefixes[0].tiers[0]
        pointers = [self._pointers(stage) for stage in range(len(prefixes))]
        chunks = len(prefixes[0].tiers)
        self._stages = Stages(pointers, [[self._tier if inputs_stored else ""] * chunks] * (len(prefixes) - 1))
        self._computing: list[_Work | None] = [None] * len(prefixes)
        self._loading: list[_Work | None] = [None] * len(prefixes)

    def run(self) -> float:
        """Seconds until all stages have all chunks."""
        now_s, changed = 0.0, set(range(len(self._prefixes)))
        while not self._stages.is_done or any(self._computing):
            for stage in sorted(changed):
                self._start(stage)
            working = [(stage, work, self._factor(stage, work)) for stage, work in self._under_way()]
            step_s = min(work.left_s * factor for _, work, factor in working)
            now_s += step_s
            changed = set()
            for stage, work, factor in working:
                work.left_s -= step_s / factor
                if work.left_s <= 1e-12:
                    self._end(stage, work)
                    changed |= {stage - 1, stage, stage + 1} & set(range(len(self._prefixes)))
        return now_s

    def _pointers(self, stage: int) -> Pointers:
        chosen = plan(self._prefixes[stage], self._costs[stage], layerwise=False)
        return Pointers(
            self._prefixes[stage].tiers,
            overtakes=lambda chunk: self._overtakes(stage, chunk),
            loads=chosen.axis != "compute",
            computes=chosen.axis != "load",
        )

    def _under_way(self) -> list[tuple[int, _Work]]:
        both = (self._computing, self._loading)
        return [(stage, work) for works in both for stage, work in enumerate(works) if work is not None]

    def _factor(self, stage: int, work: _Work) -> float:
        """How many times as long as alone it takes now."""
        if self._computing[stage] is None or self._loading[stage] is None:
            return 1.0
        contention = self._costs[stage].contention
        return contention.compute if work.kind == COMPUTE else contention.load

    def _start(self, stage: int) -> None:
        prefix, costs, stages = self._prefixes[stage], self._costs[stage], self._stages
        if not prefix.input_bytes:  # in memory: there at once
            while (chunk := stages.next_input(stage, self._tier)) is not None:
                stages.loaded_input(stage, chunk)
        if self._computing[stage] is None and (chunk := stages.next_compute(stage)) is not None:
            self._computing[stage] = _Work(COMPUTE, chunk, prefix.compute_s(chunk, prefix.layers, costs))
        if self._loading[stage] is not None:
            return
        if (chunk := stages.next_input(stage, self._tier)) is not None:
            self._loading[stage] = _Work(INPUT, chunk, costs.links[self._tier].load_s(prefix.input_bytes))
        elif (chunk := stages.next_load(stage, self._tier)) is not None:
            self._loading[stage] = _Work(KV, chunk, prefix.load_s(chunk, prefix.layers, costs))

    def _end(self, stage: int, work: _Work) -> None:
        if work.kind == COMPUTE:
            self._computing[stage] = None
            self._stages.computed(stage, work.chunk)
            return
        self._loading[stage] = None
        if work.kind == INPUT:
            self._stages.loaded_input(stage, work.chunk)
        else:
            self._stages.pointers[stage].loaded_chunk(work.chunk)

    def _overtakes(self, stage: int, chunk: int) -> bool:
        """As `StageSide`, with the costs known: computing `chunk` is done before the link is with all that is left."""
        if not self._stages.is_within_reach(stage, chunk):
            return False
        prefix, costs = self._prefixes[stage], self._costs[stage]
        stored = len(self._stages.pointers[stage].stored(self._tier))
        loading_s = stored * prefix.load_s(chunk, prefix.layers, costs)
        work = self._loading[stage]
        loading_s += work.left_s if work is not None else 0.0
        computing_s = prefix.compute_s(chunk, prefix.layers, costs) * costs.contention.compute
        return computing_s * CAUTION <= loading_s * costs.contention.load
