"""Stores a prefix of all stages: each stage's own K/V, and the hidden states at its boundary.

Owns the order of puts, nothing else. A failure to store is a reason, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.session import Bytes, KvSession, Tokens
from kvstore_engine.stages.pipeline import FloatArray, Pipeline, Stage
from kvstore_engine.stages.stores import StageStore


@dataclass(frozen=True, slots=True)
class StageStored:
    """What became of each block of a stage's K/V and of its inputs, as a put's statuses; `failure`: why not all were
    offered.
    """

    kv: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    failure: str = ""


def store_prefix(
    pipeline: Pipeline,
    stores: Sequence[StageStore],
    tokens: Tokens,
    table: npt.NDArray[np.int32],
    inputs: Sequence[Mapping[int, FloatArray]] = (),
) -> list[StageStored]:
    """Put all whole storage blocks of `tokens`, whose K/V are in the blocks of `table`: of each stage what `stores` has
    sessions for. `inputs`: `Restored.inputs`; a run of them from the first chunk on is put.
    """
    whole = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS]
    given = [*inputs] or [{}] * len(pipeline.stages)
    puts = [
        stage.submit(partial(_store, stage, store, whole, table, states))
        for stage, store, states in zip(pipeline.stages, stores, given, strict=True)
    ]
    return [put.result() for put in puts]


def _store(
    stage: Stage,
    store: StageStore,
    tokens: Tokens,
    table: npt.NDArray[np.int32],
    inputs: Mapping[int, FloatArray],
) -> StageStored:
    per_block = BLOCK_TOKENS // stage.pool.block_tokens
    tables = table[: len(tokens) // BLOCK_TOKENS * per_block].reshape(-1, per_block)
    leading = next((chunk for chunk in range(len(tables)) if chunk not in inputs), len(tables))
    kv: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    try:
        # The states first: K/V without them can be loaded, but not computed in part.
        states = _put(store.inputs, tokens, [partial(_copy, inputs[chunk]) for chunk in range(leading)])
        kv = _put(store.kv, tokens, [partial(stage.pool.gather_block, each) for each in tables])
    except Exception as error:
        return StageStored(kv, states, f"storing failed: {type(error).__name__}: {error}")
    return StageStored(kv, states)


def _put(session: KvSession | None, tokens: Tokens, payloads: Sequence[Callable[[Bytes], None]]) -> tuple[str, ...]:
    if session is None or not payloads:
        return ()
    return tuple(session.put(tokens[: len(payloads) * BLOCK_TOKENS], first_block=0, payloads=payloads).statuses)


def _copy(states: FloatArray, dest: Bytes) -> None:
    np.copyto(dest, states.view(np.uint8).reshape(-1))
