"""The arguments of the model's calls, as a cache sees them: token ids, positions, mask.

`generate` passes a cache to the model and nothing else to the cache, so each cache registers two hooks on the model.
They act only on calls with this cache and are removed with it. The module owns the hooks, and decides whether a call is
a plain continuation of one sequence. It does not restore or store.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel

from kvstore_connectors.transformers.state import positions
from kvstore_connectors.transformers.storer import Tokens
from kvstore_proto.token_ids import checked_tokens

_CACHES = ("past_key_values", "cache")  # the second is Transformers' name for it from 5.24 on
_UNDERSTOOD = frozenset({"input_ids", "attention_mask", "position_ids", "logits_to_keep", "cache_position", *_CACHES})
_HARMLESS = frozenset({"use_cache", "return_dict", "output_attentions", "output_hidden_states", "labels"})
_BY_TOKEN = ("input_ids", "position_ids", "cache_position")
_ONE_PER_TOKEN = ("output_attentions", "output_hidden_states", "labels")

Call = dict[str, Any]


class ModelCallListener(Protocol):
    """A receiver of the calls of a model with one cache. The hooks of `listen` call `before` with the arguments of each
    call, and `after` at its end.
    """

    def before(self, call: Call) -> Call: ...
    def after(self, output: Any) -> Any:
        """Handle the end of a call of the model. `output` is the call's result, or None if the call raised. Return the
        result that the caller gets.
        """
        ...


def listen(model: PreTrainedModel, cache: ModelCallListener) -> None:
    """Register hooks on `model` that call `cache` before and after every model call that uses it as its cache. The
    hooks are removed when `cache` is freed.
    """
    names = list(inspect.signature(model.forward).parameters)
    reference = weakref.ref(cache)

    def ours_in(call: Call) -> ModelCallListener | None:
        ours = reference()
        return ours if ours is not None and any(call.get(name) is ours for name in _CACHES) else None

    def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Call) -> tuple[tuple[Any, ...], Call] | None:
        call = {**dict(zip(names, args, strict=False)), **kwargs} if args else kwargs
        ours = ours_in(call)
        return ((), ours.before(call)) if ours is not None else None

    def after(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Call, output: Any) -> Any:
        ours = ours_in(kwargs)
        return output if ours is None else ours.after(output)

    hooks = (
        model.register_forward_pre_hook(before, with_kwargs=True),
        model.register_forward_hook(after, with_kwargs=True, always_call=True),
    )
    for hook in hooks:
        weakref.finalize(cache, hook.remove).atexit = False


def why_not(call: Call, held: int) -> str:
    """Return a sentence if `call` is no plain continuation of one sequence whose first `held` tokens are cached, such
    as a batch or a padded prompt. Return "" if it is one.
    """
    ids = call.get("input_ids")
    if ids is None or call.get("inputs_embeds") is not None:
        return "the input is not token ids"
    if ids.ndim != 2 or ids.shape[0] != 1:
        return f"a batch of {ids.shape[0]}: one sequence at a time is stored"
    plain = _UNDERSTOOD | _HARMLESS
    unknown = [name for name, value in call.items() if name not in plain and not _is_absent(value)]
    if unknown:
        return f"K/V may depend on the argument {min(unknown)}"
    count = ids.shape[1]
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (1, held + count)):
        return "an attention mask that is not one number for each token"
    if mask is not None and not bool(mask.all()):
        return "padding or masked tokens"
    if positions is not None and not _counts_up(positions, held, count):
        return "positions that do not count up from 0"
    return ""


def shifted_positions(model: PreTrainedModel) -> str:
    """Return a sentence if `model` shifts positions because of an image in an earlier call, as Qwen2-VL and related
    models do. Return "" if it does not.
    """
    parts = (model, getattr(model, "model", None), getattr(model, "base_model", None))
    deltas = [delta for part in parts if isinstance(delta := getattr(part, "rope_deltas", None), torch.Tensor)]
    return "positions are shifted by an image of an earlier call" if any(map(torch.any, deltas)) else ""


def unfit(model: PreTrainedModel, device: torch.device, held: int) -> str:
    """Return a sentence if the state of `model` cannot be stored or restored now, for a cache on `device` that holds
    `held` tokens. Return "" if it can.
    """
    if model.device != device:
        return "the model has been moved to another device"
    if model.training:
        return "the model is in training mode: model.eval()"
    if held == 0 and len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model's layers are on several devices"
    return shifted_positions(model)


def tokens_to_compute(call: Call) -> int | None:
    """Return the number of tokens at the end of `call` that must be computed for the output that it asks for. Return
    None if all of its tokens must be computed.
    """
    keep = call.get("logits_to_keep")
    if not isinstance(keep, int) or keep < 1 or any(call.get(name) for name in _ONE_PER_TOKEN):
        return None
    return keep


def shorten(call: Call, tokens: int) -> Call:
    """Return the arguments of `call` without its first `tokens` tokens, which are cached now. The attention mask still
    covers all tokens.
    """
    shorter = dict(call)
    for name in _BY_TOKEN:
        if shorter.get(name) is not None:
            shorter[name] = shorter[name][..., tokens:]
    return shorter


def pieces(call: Call, held: int, size: int, keep: int) -> list[Call]:
    """Split `call`, which follows `held` cached tokens, into calls that compute its tokens one after the other. Every
    call but the last ends at a multiple of `size` tokens of the sequence, and its output is not used. The last call has
    at least `keep` tokens.
    """
    end = held + call["input_ids"].shape[1]
    cuts = range(held // size * size + size, end - keep + 1, size)
    found, begin = [], held
    for cut in cuts:
        piece = shorten(call, begin - held)
        for name in _BY_TOKEN:
            if piece.get(name) is not None:
                piece[name] = piece[name][..., : cut - begin]
        if piece.get("attention_mask") is not None:
            piece["attention_mask"] = piece["attention_mask"][:, :cut]
        found.append(piece)
        begin = cut
    return [*found, shorten(call, begin - held)]


def with_positions(call: Call, model: PreTrainedModel, held: int) -> Call:
    """Return `call` with explicit positions that follow `held` cached tokens. Return it unchanged if it has positions
    already, or `model` does not take them.
    """
    if call.get("position_ids") is not None or "position_ids" not in inspect.signature(model.forward).parameters:
        return call
    return {**call, "position_ids": positions(held, call["input_ids"])}


class TokensHeld:
    """The token ids of one cached sequence. They are kept as tensors, and read when they are needed, because each
    reading waits for the GPU.
    """

    def __init__(self) -> None:
        self._parts: list[torch.Tensor] = []
        self.count = 0

    def add(self, ids: torch.Tensor) -> None:
        """Append `ids`, a tensor [1, tokens], to the sequence. The caller must not write to it again."""
        self._parts.append(ids)
        self.count += ids.shape[1]

    def cut(self, count: int) -> None:
        """Keep only the first `count` tokens of the sequence."""
        self._parts, self.count = [torch.from_numpy(self.all()[:count])[None]], count

    def all(self) -> Tokens:
        if len(self._parts) > 1:
            self._parts = [torch.from_numpy(np.concatenate([as_tokens(ids) for ids in self._parts]))[None]]
        return as_tokens(self._parts[0]) if self._parts else np.empty(0, np.int32)


def as_tokens(ids: torch.Tensor) -> Tokens:
    """Return the token ids of the only sequence in the batch `ids`, as int32[tokens]."""
    return checked_tokens(ids[0])


def _is_absent(value: Any) -> bool:
    """Return whether an argument means "none"; generate gives image models an empty dictionary for no image."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def _counts_up(positions: Any, held: int, count: int) -> bool:
    expected = torch.arange(held, held + count, device=positions.device)
    return positions.shape[-1] == count and bool((positions == expected).all())
