"""The engine with a clock in place of the model: scheduling without computing.

Owns the clock and what a step costs by it: 3.2 ms, 1.07 ms for each decode and 0.73 ms for each prompt token, which is
what a prototype of this engine took with a 125M model on two cores. K and V are those of a model with one tiny layer,
so that blocks are copied as ever but take no time. Everything that is not computing is the engine's own code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvstore_engine.batching import BatchEngine, EngineSettings
from kvstore_engine.executors.logits import HostLogits, StepLogits
from kvstore_engine.graph.step import SequenceSlice, StepLimits
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.rope import RopeConfig
from kvstore_engine.pool import BlockPool
from kvstore_engine.tokenizer.stream import StreamingDetokenizer

STEP_S, DECODE_S, PREFILL_S = 3.2e-3, 1.07e-3, 0.73e-3
_STEP_TOKENS = 512
_ROPE = RopeConfig(8, 10000.0, 1.0, 0, 0.0, 1.0, 32.0, 1.0)  # nothing rotates here


class Clock:
    """Moves only by what steps take, and by waiting for the next arrival."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += max(0.0, seconds)


class ClockedCompute:
    """Takes its time and says nothing: whose turn it is does not depend on what is said."""

    def __init__(self, limits: StepLimits, pool: BlockPool, clock: Clock) -> None:
        self.limits, self.pool = limits, pool
        self._clock = clock

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        decodes = sum(len(piece.tokens) == 1 for piece in slices)
        prefill = sum(len(piece.tokens) for piece in slices) - decodes
        self._clock.sleep(STEP_S + decodes * DECODE_S + prefill * PREFILL_S)
        outputs = sum({"last": 1, "all": len(piece.tokens), "none": 0}[piece.outputs] for piece in slices)
        return HostLogits(np.zeros((outputs, self.limits.vocabulary), np.float32))


class _NoText:
    """A tokenizer whose tokens mean nothing."""

    end_ids: frozenset[int] = frozenset()

    def stream(self, special: bool = False, continues: bool = False) -> StreamingDetokenizer:
        return StreamingDetokenizer(lambda token: b"")


def clocked_engine(settings: EngineSettings, context: int, vocabulary: int) -> tuple[BatchEngine, Clock]:
    """An engine in which every running sequence fits with the whole context."""
    config = ModelConfig(
        name="clock", architecture="llama", layers=1, width=8, feed_forward=8, heads=1, kv_heads=1, head_dim=8,
        rms_epsilon=1e-5, context_length=context, vocabulary=vocabulary, tied_embeddings=True, rope=_ROPE,
    )  # fmt: skip
    clock = Clock()
    places = settings.max_running
    pool = BlockPool(config, places * -(-context // 16))
    limits = StepLimits(vocabulary, pool.blocks, pool.block_tokens, _STEP_TOKENS + places, places, context)
    engine = BatchEngine(ClockedCompute(limits, pool, clock), _NoText(), settings=settings, clock=clock.now)
    return engine, clock
