"""The self-test of a model at opening: it compares a prompt computed in one pass with one whose blocks were restored.

The test proves that K and V of all layers, cut into blocks of tokens and put back, are the model's whole state; no list
of architectures can prove that. It runs once for each model object, device and way of computing. It costs three passes
of 80 tokens (with 8 tokens a block): some 15 ms for a small model, as long as three such prompts for a large one. It
does not change the model, torch's random numbers or the store.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvstore_client.errors import invalid
from kvstore_connectors.moments import HostMoment
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.fingerprint import (
    block_size,
    difference,
    difference_now,
    inner_model,
    written_file,
)
from kvstore_connectors.transformers.group_blocks import BlocksToRead
from kvstore_connectors.transformers.group_memory import GroupMemory
from kvstore_connectors.transformers.host_copies import gather, scatter
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.state import (
    KVShape,
    State,
    Unfit,
    answer,
    check_configuration,
    learn,
    ordinary_prompt,
    rows_of,
)
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint

_CHANGED = "the model has changed since the session was opened"
STORED_TOKENS, COMPUTED_TOKENS = 64, 16
_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.3, torch.bfloat16: 0.3}  # of logits, relative: two splits round so

_STEP_TOLERANCE = {torch.float32: 0.002, torch.float16: 0.04, torch.bfloat16: 0.04}  # of the first layer's state

_State = tuple[torch.device, torch.dtype, Any]
_tried: WeakKeyDictionary[PreTrainedModel, tuple[_State, str]] = WeakKeyDictionary()


def prove(model: PreTrainedModel, block_tokens: int | None, *, skip: bool = False) -> None:
    """Test that `model` gives equal answers from restored blocks of `block_tokens` tokens and from a completely
    computed prompt. Raises KVStoreError(INVALID) if it does not. A model in training mode, or on several devices, is
    tested later, when that has ended. With `skip` the model is not tested and counts as tested.
    """
    if failure := failure_of(model, block_tokens, skip=skip):
        raise invalid(f"the K/V state of {type(model).__name__} cannot be stored: {failure}")


def failure_of(model: PreTrainedModel, block_tokens: int | None, *, skip: bool = False) -> str:
    """Test whether `model` gives equal answers with restored blocks of `block_tokens` tokens and without, unless that
    was tested before. Return the reason of a failure as a sentence, or "" if the test succeeds. With `skip` the model
    is not tested and counts as tested.
    """
    state = (model.device, model.dtype, getattr(model.config, "_attn_implementation", None))
    known = _tried.get(model)
    if skip:
        _tried[model] = (state, "")
        return ""
    if known is not None and known[0] == state:
        return known[1]
    if model.training or len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return ""  # computed without the store, as long as that is so
    try:
        failure = _try(model, block_tokens)
    except KVStoreError:
        raise
    except Unfit as unfit:
        failure = str(unfit)
    except Exception as error:  # a model's own code may raise any
        failure = f"its self-test raised {type(error).__name__}: {error} (self_test=False opens without it)"
    _tried[model] = (state, failure)
    return failure


def changed(session: Fingerprint, model: Any) -> str:
    """Return a sentence if `model` is no longer the model that the fingerprint `session` describes, or "" if it is.
    This takes too long to be called for each token.
    """
    inner = inner_model(model)
    if differs := difference(session, model):
        return f"{_CHANGED}: {differs}"
    if written := written_file(inner):
        return f"{written}, from which weights are mapped, was written to: load the model again"
    return failure_of(inner, session.block_tokens)


def changed_now(session: Fingerprint, model: Any) -> str:
    """Return a sentence if `model` has changed in a way that is cheap to see before each token: weights were written
    to, or adapters changed. Return "" otherwise.
    """
    differs = difference_now(session, model)
    return f"{_CHANGED}: {differs}" if differs else ""


def _try(model: PreTrainedModel, asked_block_tokens: int | None) -> str:
    check_configuration(model)
    ids = ordinary_prompt(model, STORED_TOKENS + COMPUTED_TOKENS)
    whole = DynamicCache(config=model.config)
    expected = answer(model, ids, whole, COMPUTED_TOKENS)
    state = learn(model, whole, ids.shape[1])
    block_tokens = block_size(model, state, asked_block_tokens)
    stored = -(-STORED_TOKENS // block_tokens) * block_tokens
    if stored != STORED_TOKENS:
        ids, whole = ordinary_prompt(model, stored + COMPUTED_TOKENS), DynamicCache(config=model.config)
        expected = answer(model, ids, whole, COMPUTED_TOKENS)
    other, otherwise = DynamicCache(config=model.config), ids.clone()
    otherwise[:, stored:] = ids[:, :COMPUTED_TOKENS]
    answer(model, otherwise, other, COMPUTED_TOKENS)
    if _foresight(whole, other, stored) > _TOLERANCE[state.dtype] / 10:  # the same kernels: hardly any rounding
        return "K and V of its tokens depend on those behind them (attention in both directions)"
    first, second = _memory(model, state, block_tokens), _memory(model, state, block_tokens)
    cache = _cache_of(model, first)
    answer(model, ids[:, :stored], cache, COMPUTED_TOKENS)
    if not first.holds(stored) or len(cache.layers) != state.layers:
        return "its layers do not keep what a cache of one tensor gives them"
    _restore(first, second, stored, block_tokens)
    cache, held = _cache_of(model, second), 0 if isinstance(state, KVShape) else stored
    answered = answer(model, ids[:, stored:], cache, COMPUTED_TOKENS, held)
    if not second.holds(ids.shape[1]) or len(cache.layers) != state.layers:
        return "its layers do not go on behind restored K and V"
    difference = _difference(expected, answered)
    if difference > _TOLERANCE[state.dtype]:
        why = "it answers from restored state otherwise than from the whole prompt"
        return f"{why} (logits differ by {difference:.0%})"
    if isinstance(first, GroupMemory):
        return _unlike(model, first, ids, stored, answered)
    return ""


def _unlike(model: PreTrainedModel, first: GroupMemory, ids: torch.Tensor, stored: int, answered: torch.Tensor) -> str:
    """Return how the model goes on otherwise from restored state than from its own, or with several tokens in a call
    than with one after the other; "" if it does not. `first` holds the first `stored` of `ids`, and `answered` is the
    answer to the others from restored state.
    """
    if first.state.is_recurrent:
        states = []
        for tokens in ((2,), (1, 1)):
            memory = GroupMemory(first.state, model.config, first.block_tokens)
            _restore(first, memory, stored, first.block_tokens)
            at = stored
            for count in tokens:
                answer(model, ids[:, at : at + count], _cache_of(model, memory), 1, at)
                at += count
            group = memory.state.groups[-1]
            states.append([rows.float() for rows in memory.read(group, group.layers[0])])
        apart = max(_apart(*pair) for pair in zip(*states, strict=True))
        if apart > _STEP_TOLERANCE[first.state.dtype]:
            return f"behind a state it computes several tokens otherwise than one after the other ({apart:.1%})"
    unbroken = answer(model, ids[:, stored:], _cache_of(model, first), COMPUTED_TOKENS, stored)
    if ids.device.type == "cpu":
        is_whole = torch.equal(unbroken, answered)
    else:  # kernels that add up in any order
        is_whole = _difference(unbroken, answered) <= _TOLERANCE[first.state.dtype] / 10
    return "" if is_whole else "what is restored is not all of its state"


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-9))


def _foresight(one: DynamicCache, other: DynamicCache, tokens: int) -> float:
    """Return the difference between the K and V of the first `tokens` tokens of two prompts that differ only at their
    ends: relative, the median over tokens, the largest over layers.
    """
    worst = 0.0
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        for name in ("k", "v"):
            if getattr(ours, "keys", None) is None:
                continue
            here, there = rows_of(ours, name), rows_of(theirs, name)
            kept = len(here) - (one.get_seq_length() - tokens)  # a window has the last ones alone
            if kept <= 0:
                continue
            expected, found = (each[:kept].float().flatten(1) for each in (here, there))
            relative = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
            worst = max(worst, float(relative.nan_to_num(nan=float("inf")).median()))
    return worst


def _memory(model: PreTrainedModel, state: State, block_tokens: int) -> KVStack | GroupMemory:
    if isinstance(state, KVShape):
        return KVStack(state)
    return GroupMemory(state, model.config, block_tokens)


def _restore(source: KVStack | GroupMemory, target: KVStack | GroupMemory, tokens: int, block_tokens: int) -> None:
    """Copy the blocks of `source` into `target`, through payloads as the store has them."""
    if isinstance(source, GroupMemory) and isinstance(target, GroupMemory):
        _restore_groups(source, target, tokens, block_tokens)
        return
    assert isinstance(source, KVStack) and isinstance(target, KVStack) and source.tensor is not None
    shape = source.shape
    nbytes = shape.layers * 2 * shape.heads * block_tokens * shape.head_dim * shape.item_bytes
    payloads: list[npt.NDArray[np.uint8]] = []
    for begin in range(0, tokens, block_tokens):
        payloads.append(np.zeros(nbytes, np.uint8))
        gather(source.tensor, begin, begin + block_tokens, payloads[-1])
    target.reserve(tokens, source.tensor.device)
    assert target.tensor is not None
    scatter(target.tensor, payloads, TokenSpan(0, tokens, block_tokens))
    target.extend_to(tokens)


def _restore_groups(source: GroupMemory, target: GroupMemory, tokens: int, block_tokens: int) -> None:
    payloads: dict[tuple[int | None, int], npt.NDArray[np.uint8]] = {}
    for run in source.blocks_until(tokens, block_tokens, HostMoment(None)).runs(range(tokens // block_tokens)):
        group = next(group for group in source.state.groups if group.group_id == run.group)
        for block, fill in enumerate(run.payloads, run.first):
            payloads[run.group, block] = np.zeros(len(group.layers) * group.layer_bytes(block_tokens), np.uint8)
            fill(payloads[run.group, block])
    loaded: dict[tuple[int, int], list[torch.Tensor]] = {}
    for group in source.state.groups:
        needed = group.needed_blocks(tokens // block_tokens, block_tokens)
        device = source.read(group, group.layers[0])[0].device
        blocks = [payloads[group.group_id, block] for block in needed]
        read = BlocksToRead(group, blocks, block_tokens, device)
        read.fill_all()
        loaded |= {(group.group_id, layer): rows for layer, rows in read.rows.items()}
    target.install(tokens, 0, loaded)


def _cache_of(model: PreTrainedModel, memory: KVStack | GroupMemory) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = list(memory.layers)
    return cache


def _difference(expected: torch.Tensor, answered: torch.Tensor) -> float:
    """Return the difference of rows, relative to their spread. It is the median, since in another split a router may
    choose otherwise for some tokens.
    """
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    relative = ((answered - expected).norm(dim=-1) / spread.clamp_min(1e-9)).nan_to_num(nan=float("inf"))
    return float(relative.median())
