"""The self-test of a model at opening: it compares a prompt computed in one pass with one whose blocks were restored.

The test proves that K and V of all layers, cut into blocks of tokens and put back, are the model's whole state; no list
of architectures can prove that. It runs once for each model object, device and way of computing. It costs three passes
of 80 tokens (with 8 tokens a block): some 15 ms for a small model, as long as three such prompts for a large one. It
does not change the model, torch's random numbers or the store.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvstore_client.errors import invalid
from kvstore_connectors.transformers.copies import Span
from kvstore_connectors.transformers.fingerprint import KVShape, kv_shape
from kvstore_connectors.transformers.host_copies import gather, scatter
from kvstore_connectors.transformers.layers import KVStack

STORED_TOKENS, COMPUTED_TOKENS = 64, 16
_TOLERANCE = {torch.float32: 0.02, torch.float16: 0.3, torch.bfloat16: 0.3}  # of logits, relative: two splits round so

_State = tuple[torch.device, torch.dtype, Any]
_tried: WeakKeyDictionary[PreTrainedModel, tuple[_State, str]] = WeakKeyDictionary()


def prove(model: PreTrainedModel, block_tokens: int, *, skip: bool = False) -> None:
    """Raise KVStoreError(INVALID) unless `model` answers from restored blocks of `block_tokens` as from a whole prompt.

    A model in training mode, or on several devices, is tested later, when it no longer is. `skip`: count it as tested.
    """
    if failure := failure_of(model, block_tokens, skip=skip):
        raise invalid(f"the K/V state of {type(model).__name__} cannot be stored: {failure}")


def failure_of(model: PreTrainedModel, block_tokens: int, *, skip: bool = False) -> str:
    """Return the reason why `prove` raises; "" if it does not. A model is tested once."""
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
        failure = _try(model, kv_shape(model), block_tokens)
    except Exception as error:  # a model's own code may raise any
        failure = f"its self-test raised {type(error).__name__}: {error} (self_test=False opens without it)"
    _tried[model] = (state, failure)
    return failure


def _try(model: PreTrainedModel, shape: KVShape, block_tokens: int) -> str:
    stored = -(-STORED_TOKENS // block_tokens) * block_tokens
    ids = _prompt(model, stored + COMPUTED_TOKENS)
    whole = DynamicCache(config=model.config)
    expected = _answer(model, ids, whole)
    if misfit := _misfit(whole, shape, ids.shape[1]):
        return misfit
    other, otherwise = DynamicCache(config=model.config), ids.clone()
    otherwise[:, stored:] = ids[:, :COMPUTED_TOKENS]
    _answer(model, otherwise, other)
    if _foresight(whole, other, stored) > _TOLERANCE[shape.dtype] / 10:  # the same kernels: hardly any rounding
        return "K and V of its tokens depend on those behind them (attention in both directions)"
    first = KVStack(shape)
    cache = _cache_of(model, first)
    _answer(model, ids[:, :stored], cache)
    if not first.holds(stored) or len(cache.layers) != shape.layers:
        return "its layers do not keep what a cache of one tensor gives them"
    second = KVStack(shape)
    _restore(first, second, stored, block_tokens)
    cache = _cache_of(model, second)
    answered = _answer(model, ids[:, stored:], cache)
    if not second.holds(ids.shape[1]) or len(cache.layers) != shape.layers:
        return "its layers do not go on behind restored K and V"
    difference = _difference(expected, answered)
    if difference <= _TOLERANCE[shape.dtype]:
        return ""
    return f"it answers from restored K and V otherwise than from the whole prompt (logits differ by {difference:.0%})"


def _misfit(cache: DynamicCache, shape: KVShape, tokens: int) -> str:
    """Return the layer of a computed `cache` whose K and V do not have `shape`, as text; "" if there is none."""
    expected = (1, shape.heads, tokens, shape.head_dim)
    if len(cache.layers) != shape.layers:
        return f"it keeps {len(cache.layers)} layers, and its configuration says {shape.layers}"
    for index, layer in enumerate(cache.layers):
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is None or tensor.numel() == 0:
                return f"layer {index} keeps no K and V of the tokens (cross attention, or another kind of state)"
            if tuple(tensor.shape) != expected:
                return (
                    f"layer {index} keeps K and V as {list(tensor.shape)}, and its configuration says {list(expected)}"
                )
            if tensor.dtype != shape.dtype:
                return f"layer {index} keeps K and V in {tensor.dtype}, and the model computes in {shape.dtype}"
    return ""


def _foresight(one: DynamicCache, other: DynamicCache, tokens: int) -> float:
    """Return the difference between the K and V of the first `tokens` tokens of two prompts that differ only at their
    ends: relative, the median over tokens, the largest over layers.
    """
    worst = 0.0
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        for here, there in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            expected, found = (each[0, :, :tokens].float().transpose(0, 1).flatten(1) for each in (here, there))
            relative = (found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
            worst = max(worst, float(relative.nan_to_num(nan=float("inf")).median()))
    return worst


def _restore(source: KVStack, target: KVStack, tokens: int, block_tokens: int) -> None:
    """Copy the blocks of the stack `source` into `target`, through payloads as the store has them."""
    assert source.tensor is not None
    shape = source.shape
    nbytes = shape.layers * 2 * shape.heads * block_tokens * shape.head_dim * shape.item_bytes
    payloads: list[npt.NDArray[np.uint8]] = []
    for begin in range(0, tokens, block_tokens):
        payloads.append(np.zeros(nbytes, np.uint8))
        gather(source.tensor, begin, begin + block_tokens, payloads[-1])
    target.reserve(tokens, source.tensor.device)
    assert target.tensor is not None
    scatter(target.tensor, payloads, Span(0, tokens, block_tokens))
    target.extend_to(tokens)


def _cache_of(model: PreTrainedModel, stack: KVStack) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    cache.layers = list(stack.layers)
    return cache


def _answer(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the logits (or the model's equivalent output) of the last tokens: [tokens, number] in f32."""
    parameters = inspect.signature(model.forward).parameters
    call: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in parameters:
        call["logits_to_keep"] = COMPUTED_TOKENS
    with torch.no_grad():
        output = model(input_ids=ids, **call)
    logits = output.logits if getattr(output, "logits", None) is not None else output[0]
    return logits[0, -COMPUTED_TOKENS:].float()


def _difference(expected: torch.Tensor, answered: torch.Tensor) -> float:
    """Return the difference of rows, relative to their spread. It is the median, since in another split a router may
    choose otherwise for some tokens.
    """
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    relative = ((answered - expected).norm(dim=-1) / spread.clamp_min(1e-9)).nan_to_num(nan=float("inf"))
    return float(relative.median())


def _prompt(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    """Return ids of ordinary tokens, equal at each call: [1, tokens], on the device of the model's first weights."""
    config = model.config.get_text_config(decoder=True)
    vocabulary = int(config.vocab_size)
    both = {**model.config.to_dict(), **config.to_dict()}
    special = {
        both[name] for name in both if name.endswith(("token_id", "token_index")) and isinstance(both[name], int)
    }
    ordinary = np.setdiff1d(np.arange(vocabulary), np.array(sorted(special), np.int64))
    chosen = ordinary[np.arange(1, tokens + 1) * 7919 % len(ordinary)]
    device = next(model.parameters()).device
    return torch.from_numpy(chosen.astype(np.int64))[None].to(device)
