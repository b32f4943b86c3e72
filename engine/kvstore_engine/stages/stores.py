"""The blocks of each stage in the daemon: the K/V of its layers, and the hidden states from which it computes.

The module owns the fingerprints, the look-ups and the order of puts. K/V of a stage are a shard: other cuts of the
model do not find them. Hidden states belong to the layer whose input they are, so stages that begin there share them,
in any number of stages. A store that cannot be reached, or does not answer in time, has nothing; a failure to store is
a reason, never an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore_engine.executors.logits import FloatArray
from kvstore_engine.graph.plan import BLOCK_TOKENS
from kvstore_engine.restore.progress import ABSENT
from kvstore_engine.restore.session import Bytes, KvSession, Tokens
from kvstore_engine.stages.pipeline import Pipeline, Stage
from kvstore_proto.fingerprint import Fingerprint

HIDDEN_BYTES = 4  # float32, as they pass between stages: what is restored has the bits of what was computed
_HIDDEN_LAYOUT = "hidden-states-f32/token-major"
_DEADLINE_S = 0.25


@dataclass(frozen=True, slots=True)
class StageStore:
    """The sessions with the daemon of one pipeline stage: `kv` for the K/V of its layers, `inputs` for the hidden
    states that it computes from. None means that nothing is stored there.
    """

    kv: KvSession | None = None
    inputs: KvSession | None = None


def stage_fingerprints(
    whole: Fingerprint, layers: Sequence[range], width: int
) -> list[tuple[Fingerprint, Fingerprint | None]]:
    """Return two fingerprints for each stage, under which its K/V and its hidden states are stored (None for the hidden
    states of the first stage). `whole` is the model's fingerprint, `layers` has each stage's layers, `width` is the
    number of values of a hidden state.
    """
    (group,) = whole.groups
    count = len(layers)
    found: list[tuple[Fingerprint, Fingerprint | None]] = []
    for number, own in enumerate(layers):
        kv = replace(whole, shard_index=number, shard_count=count, groups=(replace(group, layers=tuple(own)),))
        states = replace(group, layers=(own.start,), bytes_per_token_per_layer=HIDDEN_BYTES * width)
        found.append((kv, replace(whole, layout=_HIDDEN_LAYOUT, groups=(states,)) if number else None))
    return found


@dataclass(frozen=True, slots=True)
class StageLookup:
    """The tiers in which a prompt is stored for one pipeline stage: for each chunk (storage block) the tier of its K/V
    and the tier of the hidden states that it is computed from, "absent" if they are not stored. `load_s` has by tier
    the seconds that loading one chunk's K/V should take.
    """

    kv: tuple[str, ...]
    inputs: tuple[str, ...]
    load_s: Mapping[str, float] = field(default_factory=dict)


def look_up(store: StageStore, tokens: Tokens) -> StageLookup:
    """Ask the daemon in which tiers the whole storage blocks of `tokens` are stored for the stage with the sessions
    `store`, and return the tiers.
    """
    kv, load_s = _tiers(store.kv, tokens)
    inputs, _ = _tiers(store.inputs, tokens)
    return StageLookup(kv, inputs, load_s)


def leading(tiers: tuple[str, ...]) -> int:
    """Return how many entries at the start of `tiers` are not "absent"."""
    return next((at for at, tier in enumerate(tiers) if tier == ABSENT), len(tiers))


def _tiers(session: KvSession | None, tokens: Tokens) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return where each chunk of `tokens` is, and the expected seconds of loading one from each tier."""
    chunks = len(tokens) // BLOCK_TOKENS
    tiers: tuple[str, ...] = ()
    seconds: dict[str, list[float]] = {}
    if chunks and session is not None and session.state == "connected":
        try:
            answer = session.lookup(tokens, deadline_s=_DEADLINE_S)
            tiers = answer.tiers[: leading(answer.tiers)]
            for tier, load_s in zip(answer.tiers, answer.load_s, strict=False):
                seconds.setdefault(tier, []).append(load_s)
        except Exception:  # what cannot be looked up is computed
            tiers = ()
    means = {tier: sum(each) / len(each) for tier, each in seconds.items()}
    return (tiers + (ABSENT,) * chunks)[:chunks], means


@dataclass(frozen=True, slots=True)
class StageStored:
    """The result of storing one stage's blocks: a status for each block, of its K/V and of its hidden states. `failure`
    says why not all were stored.
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
    """Store the whole storage blocks of `tokens`, whose K/V are in the pool blocks `table`, in the daemon for every
    stage of `pipeline`. `inputs` has for each stage the hidden states to store, by block. Return the result of each
    stage.
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
