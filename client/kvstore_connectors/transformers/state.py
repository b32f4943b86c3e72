"""The state that a model's cache keeps of one sequence, layer by layer, as a computed cache shows it.

No configuration says it reliably: heads, widths and kinds of layers are taken from the tensors that a short prompt left
in a `DynamicCache`. A model whose layers all keep K and V alike has a `KVShape`; one with sliding windows, recurrent
states or a latent has a `GroupedState`. Classes of layers that are not known here are refused by name. The module
computes a prompt of a few tokens at most once for each model, and stores nothing.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from dataclasses import dataclass
from math import lcm
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvstore_client.errors import invalid
from kvstore_proto.fingerprint import LayerGroup, StatePart

DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
BLOCK_TOKENS = 8  # what a prompt leaves over after its last full block is computed: smaller blocks leave less
LINEAR_CHUNK = 64  # of gated delta rules; a configuration says others
MOST_STATE_TOKENS = 512  # between two states that are stored, unless the caller says more
MOST_STATE_RATIO = 4  # a state may take so much more room than the K and V of its block
TRIAL_TOKENS = 2

_KINDS = {  # by the name of the layer's class: the kind of its K and V, and whether it has a state beside or instead
    "DynamicLayer": ("full", False),
    "DynamicIndexedLayer": ("full", False),
    "DynamicSlidingWindowLayer": ("sliding", False),
    "LinearAttentionLayer": ("", True),
    "LinearAttentionAndFullAttentionLayer": ("full", True),
    "LinearAttentionAndSlidingWindowAttentionLayer": ("sliding", True),
    "DummyLayer": ("", False),
}
_ORDER = ("full", "latent", "sliding", "recurrent")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_WANDERING_ROPE = ("dynamic", "longrope")  # their angles depend on how long the sequence became later


class Unfit(ValueError):
    """The error of a model's state that cannot be stored. The message says why, as the end of a sentence about the
    model.
    """


@dataclass(frozen=True, slots=True)
class KVShape:
    """The shape of one token's K and V in a model whose layers are alike: `layers` x (K, V) x `heads` x `head_dim`
    numbers of `dtype`.
    """

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def item_bytes(self) -> int:
        return int(self.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class GroupedState:
    """A description of the state of a model whose layers keep different kinds of state: its layer `groups`, and the
    number of its `layers`. A recurrent state exists only where a call of the model ends, so blocks are multiples of
    `chunk` tokens. `chunk` is 1 for a model without recurrent states.
    """

    groups: tuple[LayerGroup, ...]
    layers: int
    dtype: torch.dtype
    chunk: int = 1

    @property
    def is_recurrent(self) -> bool:
        return any(group.kind == "recurrent" for group in self.groups)

    @property
    def can_go_back(self) -> bool:
        """Return whether the last tokens can be removed from a computed state. Windows and recurrent states cannot go
        back.
        """
        return all(group.kind in ("full", "latent") for group in self.groups)

    def default_block_tokens(self) -> int:
        """Return the number of tokens of a block if the caller names none. A model with large recurrent states has
        larger blocks, so that fewer states are stored.
        """
        if not self.is_recurrent:
            return BLOCK_TOKENS
        tokens, state_bytes, token_bytes = self.chunk, 0, 0
        for group in self.groups:
            nbytes = len(group.layers) * group.layer_bytes(block_tokens=1)
            if group.kind == "recurrent":
                state_bytes += nbytes
            else:
                token_bytes += nbytes
        while tokens * 2 <= MOST_STATE_TOKENS and state_bytes > MOST_STATE_RATIO * tokens * token_bytes:
            tokens *= 2
        return tokens


State = KVShape | GroupedState


def rows_of(layer: Any, name: str) -> torch.Tensor:
    """Return the tensor of the part `name` of a cache layer's state, for its one sequence: [token, *shape of a token],
    or the state's shape. Raises KeyError or AttributeError if the layer has no such part.
    """
    if name == "k":
        return layer.keys[0].transpose(0, 1)  # type: ignore[no-any-return]
    if name == "v":
        return layer.values[0].transpose(0, 1)  # type: ignore[no-any-return]
    if name == "indexer":
        return layer.indexer_keys[0]  # type: ignore[no-any-return]
    kind, _, number = name.rpartition("-")
    return getattr(layer, f"{kind}_states")[int(number)][0]  # type: ignore[no-any-return]


def measured(cache: DynamicCache, model: PreTrainedModel, tokens: int) -> State:
    """Return a description of the state that `cache` holds after `model` computed a prompt of `tokens` tokens. Raises
    Unfit if it cannot be stored.
    """
    found: defaultdict[tuple[str, int, tuple[StatePart, ...]], list[int]] = defaultdict(list)
    for index, layer in enumerate(cache.layers):
        for kind, window, parts in _parts(index, layer, tokens):
            found[kind, window, parts].append(index)
    if not any(kind != "recurrent" for kind, _, _ in found):
        raise Unfit("none of its layers keeps K and V, by which a cache counts its tokens")
    if len(found) == 1 and (dense := _dense(*next(iter(found.items())), model, len(cache.layers))) is not None:
        return dense
    ordered = sorted(found.items(), key=lambda item: (_ORDER.index(item[0][0]), item[1]))
    groups = tuple(
        LayerGroup(number, kind=kind, window_tokens=window, layers=tuple(layers), parts=parts)
        for number, ((kind, window, parts), layers) in enumerate(ordered)
    )
    chunk = _chunk(model.config.get_text_config(decoder=True)) if ordered[-1][0][0] == "recurrent" else 1
    return GroupedState(groups, len(cache.layers), model.dtype, chunk)


def _dense(key: Any, layers: list[int], model: PreTrainedModel, count: int) -> KVShape | None:
    kind, _, parts = key
    if kind != "full" or len(layers) != count or parts[0].dtype != DTYPES.get(model.dtype):
        return None
    heads, head_dim = parts[0].shape
    return KVShape(count, heads, head_dim, model.dtype)


def _parts(index: int, layer: Any, tokens: int) -> list[tuple[str, int, tuple[StatePart, ...]]]:
    name = type(layer).__name__
    if name not in _KINDS:
        raise Unfit(f"layer {index} keeps its state in a {name}, whose parts are not known")
    kind, has_states = _KINDS[name]
    found = []
    if kind:
        names = ["k", "v"] + ["indexer"] * (name == "DynamicIndexedLayer")
        if getattr(layer, "indexer_position_ids", None) is not None:
            raise Unfit(f"layer {index} keeps positions of an indexer")
        window = int(layer.sliding_window) if kind == "sliding" else 0
        kept = min(tokens, window - 1) if window else tokens
        parts = tuple(_rows_part(index, layer, part, kept) for part in names)
        if kind == "full" and any(part.shape != parts[0].shape for part in parts):
            kind = "latent"
        found.append((kind, window, parts))
    if has_states:
        found.append(("recurrent", 0, _states(index, layer)))
    return found


def _rows_part(index: int, layer: Any, name: str, tokens: int) -> StatePart:
    try:
        rows = rows_of(layer, name)
    except (AttributeError, TypeError, IndexError):
        rows = torch.empty(0)
    if rows.numel() == 0:
        raise Unfit(f"layer {index} keeps no K and V of the tokens (cross attention, or another kind of state)")
    if rows.shape[0] != tokens:
        raise Unfit(f"layer {index} keeps {name} of {rows.shape[0]} tokens after {tokens}")
    return StatePart(name, _dtype(index, rows), tuple(rows.shape[1:]))


def _states(index: int, layer: Any) -> tuple[StatePart, ...]:
    parts = []
    for number in range(layer.number_of_states):
        for kind in ("conv", "recurrent"):
            if getattr(layer, f"{kind}_states")[number] is not None:
                state = rows_of(layer, f"{kind}-{number}")
                parts.append(StatePart(f"{kind}-{number}", _dtype(index, state), tuple(state.shape)))
    if not parts or not all(layer.has_previous_state.values()):
        raise Unfit(f"layer {index} keeps its state outside of the cache")
    return tuple(parts)


def _dtype(index: int, tensor: torch.Tensor) -> str:
    if tensor.dtype not in DTYPES:
        raise Unfit(f"layer {index} keeps its state in {tensor.dtype}, and {', '.join(DTYPES.values())} are stored")
    return DTYPES[tensor.dtype]


def _chunk(config: Any) -> int:
    sizes = [size for name in _CHUNKS if isinstance(size := getattr(config, name, None), int) and size > 0]
    return lcm(LINEAR_CHUNK, *sizes)


_known: WeakKeyDictionary[PreTrainedModel, tuple[torch.dtype, State]] = WeakKeyDictionary()


def learn(model: PreTrainedModel, cache: DynamicCache, tokens: int) -> State:
    """Return a description of the state that `cache` holds after `model` computed a prompt of `tokens` tokens, and
    remember it for `state_of`. Raises Unfit if the state cannot be stored.
    """
    state = measured(cache, model, tokens)
    _known[model] = (model.dtype, state)
    return state


def state_of(model: PreTrainedModel) -> State:
    """Return a description of the state that `model` keeps of a sequence. The first call has the model compute two
    tokens. Raises KVStoreError(INVALID), with the reason, for a model whose state cannot be stored.
    """
    check_configuration(model)
    known = _known.get(model)
    if known is not None and known[0] == model.dtype:
        return known[1]
    cache = DynamicCache(config=model.config)
    try:
        with torch.random.fork_rng(devices=[]):
            answer(model, ordinary_prompt(model, TRIAL_TOKENS), cache, 1)
        return learn(model, cache, TRIAL_TOKENS)
    except Unfit as unfit:
        raise unstorable(model, str(unfit)) from None
    except Exception as error:  # a model's own code may raise any
        raise unstorable(model, f"a trial raised {type(error).__name__}: {error}") from None


def check_configuration(model: PreTrainedModel) -> None:
    """Raise KVStoreError(INVALID) if the configuration of `model` alone says that its state cannot be stored."""
    whole = model.config
    config = whole.get_text_config(decoder=True)
    if whole.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        raise unstorable(model, "its cross attention depends on another input than the tokens")
    rope = rope_of(config)
    wandering = next((kind for kind in _WANDERING_ROPE if f'"{kind}"' in rope), None)
    if wandering:
        raise unstorable(model, f"with {wandering} rope, keys depend on the length that a sequence reaches later")
    if model.dtype not in DTYPES:
        raise unstorable(model, f"it computes in {model.dtype}, and K/V is stored in {', '.join(DTYPES.values())}")


def unstorable(model: torch.nn.Module, why: str) -> Exception:
    return invalid(f"the K/V state of {type(model).__name__} cannot be stored: {why}")


def rope_of(config: Any) -> str:
    """Return the settings of rotary positions in a model's `config`, as JSON. It reads the names of old and new
    releases of Transformers.
    """
    names = ("rope_parameters", "rope_theta", "rope_scaling", "partial_rotary_factor", "rotary_pct")
    found = {name: value for name in names if (value := getattr(config, name, None)) is not None}
    return json.dumps(found, sort_keys=True, default=str)


def answer(model: PreTrainedModel, ids: torch.Tensor, cache: DynamicCache, last: int, held: int = 0) -> torch.Tensor:
    """Compute the tokens `ids` with `cache`, and return the logits of the `last` tokens, as float32 [tokens,
    vocabulary]. If `held` is not 0, the model is given positions that count from `held`.
    """
    parameters = inspect.signature(model.forward).parameters
    call: dict[str, Any] = {"cache" if "cache" in parameters else "past_key_values": cache, "use_cache": True}
    if "logits_to_keep" in parameters:
        call["logits_to_keep"] = last
    if held and "position_ids" in parameters:
        call["position_ids"] = positions(held, ids)
    with torch.no_grad():
        output = model(input_ids=ids, **call)
    logits = output.logits if getattr(output, "logits", None) is not None else output[0]
    return logits[0, -last:].float()


def positions(held: int, ids: torch.Tensor) -> torch.Tensor:
    """Return the positions of the tokens `ids`, which follow `held` tokens, as a tensor [1, tokens]. Some models
    (Bamba) count from 0 in each call if they are given no positions.
    """
    return torch.arange(held, held + ids.shape[1], device=ids.device)[None]


def ordinary_prompt(model: PreTrainedModel, tokens: int) -> torch.Tensor:
    """Return the ids of `tokens` ordinary tokens of `model`, the same at each call, as a tensor [1, tokens] on its
    device.
    """
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
