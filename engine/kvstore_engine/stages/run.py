"""One restoration of all stages under way, and what streams have brought put in its place.

Owns the copies into the stages' pools, and the hidden states that wait for a stage or for being stored. It never
computes, waits or decides. Invariants: a chunk counts as loaded only if its lease was still valid after it was copied;
what a stage computes now is not copied over.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.pool import BlockPool
from kvstore_engine.restore.fetcher import Arrival
from kvstore_engine.restore.session import Tokens
from kvstore_engine.stages.restoration import MAPPED, StageSide, Step
from kvstore_restore.pointers import State
from kvstore_restore.stages import Stages


@dataclass(slots=True, eq=False)
class Run:
    """`table`: the prompt's engine blocks. `held`: for each stage the inputs that it will compute from, by chunk.
    `kept`: those that were computed and are not stored, None if they are not kept.
    """

    tokens: Tokens
    table: npt.NDArray[np.int32]
    sides: list[StageSide]
    stages: Stages
    held: list[dict[int, FloatArray]]
    kept: list[dict[int, FloatArray]] | None
    steps: list[Step] = field(default_factory=list)

    def take_computed(self, stage: int, chunk: int, states: FloatArray, *, is_lacking: bool) -> None:
        """The stage has computed a chunk that ends in `states`, which the next one lacks, or has already."""
        self.held[stage].pop(chunk, None)
        following = stage + 1
        if following == len(self.sides):
            return
        if is_lacking:
            self.held[following][chunk] = states
        if self.kept is not None and chunk >= self.sides[following].stored_inputs:
            self.kept[following][chunk] = states

    def continued_inputs(self) -> tuple[dict[int, FloatArray], ...]:
        """Of what is kept, the chunks that follow the stored ones without a gap."""
        runs = []
        for side, kept in zip(self.sides, self.kept or (), strict=False):
            end = side.stored_inputs
            while end in kept:
                end += 1
            runs.append({chunk: kept[chunk] for chunk in range(side.stored_inputs, end)})
        return tuple(runs)

    def take_kv(self, side: StageSide, pool: BlockPool, arrival: Arrival, clock: Callable[[], float]) -> None:
        """Copy the K/V that are wanted to the stage's `pool`, and release the lease. Raises ValueError for a payload
        of another size.
        """
        lease, per_block = arrival.lease, BLOCK_TOKENS // pool.block_tokens
        side.note_arrival(arrival.first, len(lease), arrival.at_s)
        begin_s, mapped = clock(), 0
        for at in range(len(lease)):
            chunk = arrival.first + at
            if self.stages.computing(side.number) == chunk:
                continue
            if side.pointers.state(chunk) is not State.PRESENT:
                table = self.table[chunk * per_block : (chunk + 1) * per_block]
                pool.scatter_block(np.asarray(lease.payload(at)), table)
                if not lease.valid:
                    side.pointers.lose(chunk)
                    side.lost += 1
                    continue
                mapped += side.found.kv[chunk] == MAPPED
            side.pointers.loaded_chunk(chunk)
        side.learned.observe_load(MAPPED, mapped * side.chunk_bytes, clock() - begin_s)
        lease.__exit__(None, None, None)

    def take_states(self, side: StageSide, arrival: Arrival) -> None:
        """Keep the hidden states that are wanted, and release the lease. Raises as `take_kv`."""
        lease = arrival.lease
        side.note_inputs(arrival.first, len(lease), arrival.at_s)
        for at in range(len(lease)):
            chunk = arrival.first + at
            if chunk < side.pointers.head and self.stages.wanted(side.number) != chunk:
                continue
            states = np.array(lease.payload(at)).view(np.float32).reshape(BLOCK_TOKENS, -1)
            if lease.valid and self.stages.loaded_input(side.number, chunk):
                self.held[side.number][chunk] = states
                side.inputs_loaded += 1
        lease.__exit__(None, None, None)
