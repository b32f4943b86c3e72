"""Stores a prefix of all stages: each stage's own K/V, and the hidden states at its boundary.

Owns the order of puts, nothing else. A failure to store is a reason, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.session import Bytes, KvSession, Tokens
from kvstore_engine.stages.pipeline import Pipeline, Stage
from kvstore_engine.stages.stores import StageStore


@dataclass(frozen=True, slots=True)
class StageStored:
    """What became of each block of a stage's K/V and of its inputs, as a put's statuses; `failure`: why not all of them
    were stored.
    """

    kv: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Put:
    """The statuses of a put's blocks, and why one of them was not stored."""

    statuses: tuple[str, ...] = ()
    failure: str = ""


def store_prefix(
    pipeline: Pipeline,
    stores: Sequence[StageStore],
    tokens: Tokens,
    table: npt.NDArray[np.int32],
    inputs: Sequence[Mapping[int, FloatArray]] = (),
) -> list[StageStored]:
    """Put all whole storage blocks of `tokens`, whose K/V are in the blocks of `table`: of each stage what `stores` has
    sessions for. `inputs`: `Restored.inputs`; of each stage the run from its first chunk on is put.
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
    first = end = min(inputs, default=0)
    while end in inputs and end < len(tables):
        end += 1
    # The states first: K/V without them can be loaded, but not computed in part.
    given = [partial(_copy, inputs[chunk]) for chunk in range(first, end)]
    states = _put(store.inputs, "hidden states", tokens, first, given)
    kv = _put(store.kv, "K/V", tokens, 0, [partial(stage.pool.gather_block, each) for each in tables])
    return StageStored(kv.statuses, states.statuses, states.failure or kv.failure)


def _put(
    session: KvSession | None, what: str, tokens: Tokens, first: int, payloads: Sequence[Callable[[Bytes], None]]
) -> _Put:
    if session is None or session.state != "connected" or not payloads:
        return _Put()
    try:
        receipt = session.put(tokens[: (first + len(payloads)) * BLOCK_TOKENS], first_block=first, payloads=payloads)
    except Exception as error:  # a failure to store must not end an answer
        return _Put(failure=f"storing failed: {type(error).__name__}: {error}")
    statuses = tuple(receipt.statuses)
    lost = next((at for at, status in enumerate(statuses) if status not in ("stored", "present")), None)
    if lost is None:
        return _Put(statuses)
    why = f": {receipt.reason}" if receipt.reason else ""
    return _Put(statuses, f"block {first + lost} of the {what} was {statuses[lost]}{why}")


def _copy(states: FloatArray, dest: Bytes) -> None:
    np.copyto(dest, states.view(np.uint8).reshape(-1))
