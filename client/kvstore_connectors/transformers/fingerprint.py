"""The fingerprint of a loaded Transformers model: everything but the tokens that its K/V bytes depend on.

The module translates a model to `kvstore_proto`'s terms. The fingerprint covers the model in memory, not the place it
was loaded from: a merged adapter, an edited weight or another dtype is another model. The attention implementations
that come with Transformers differ only by rounding, and share blocks. An implementation that a program registered, or
that comes from a hub, may compute other values, and is another model. A model on a CUDA device shares no blocks with
one elsewhere: other kernels give other bits, and its blocks have another layout. Where a state is more than K and V of
full attention, the release of Transformers is in the fingerprint: from one to the next it keeps the same state as other
tensors (5.15: MLA).

A mapped weight changes with its file, unseen by torch: loading does not copy safetensors of the model's own dtype. So
the module keeps the files of each model open, with their state when the weights were hashed or named by an id. Weights
that were copied, or are on a device, have no files here. Invariant: the digest of a model is computed again when a
weight, its file, an adapter or its state has changed.
"""

from __future__ import annotations

import bisect
import json
import operator
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import transformers
import xxhash
from transformers import PreTrainedModel

from kvstore_client.errors import invalid
from kvstore_connectors.transformers.state import (
    BLOCK_TOKENS,
    DTYPES,
    GroupedState,
    KVShape,
    State,
    rope_of,
    state_of,
    unstorable,
)
from kvstore_connectors.weight_files import DELETED, Mapping, WeightFiles, mappings_now
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.kv_layout import ENGINE_ORDER, HEADS_ORDER, TOKENS_ORDER

LAYOUT = HEADS_ORDER
DEVICE_LAYOUT = TOKENS_ORDER  # on a CUDA device: a block is one run of bytes in each layer
ID_PREFIX = "id:"

_SAME_ATTENTION = frozenset({"eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"})
_SAMPLES = 4  # of each dimension of a weight, to see what torch does not count
_NOT_IDENTITY = frozenset(  # of a configuration: labels, defaults of generation, how it is computed
    {"_name_or_path", "_model_name_or_path", "name_or_path", "architectures", "transformers_version", "use_cache",
     "dtype", "torch_dtype", "return_dict", "output_attentions", "output_hidden_states", "_attn_implementation",
     "id2label", "label2id", "problem_type", "bos_token_id", "eos_token_id", "pad_token_id"}
)  # fmt: skip


def inner_model(model: Any) -> PreTrainedModel:
    """Return the Transformers model inside `model`, without its wrappers (an adapter library, torch.compile). Raises
    KVStoreError(INVALID) if there is none.
    """
    if isinstance(model, PreTrainedModel):
        return model
    found = next((part for part in getattr(model, "modules", list)() if isinstance(part, PreTrainedModel)), None)
    if found is None:
        raise invalid(f"a Transformers model is needed, got {type(model).__name__}")
    return found


def device_index(model: PreTrainedModel) -> int | None:
    """Return the number of the CUDA device that `model` is on, as the driver counts in this process. Return None if it
    is on no CUDA device.
    """
    device = model.device
    if device.type != "cuda" or torch.version.hip:  # AMD's go by the same name
        return None
    return int(torch.cuda.current_device() if device.index is None else device.index)


def model_fingerprint(
    model: Any, *, model_id: str | None = None, block_tokens: int | None = None, key_hash: str = "xxh3"
) -> Fingerprint:
    """Return the fingerprint of `model` to open a session with: everything but tokens that its K/V state depends on.
    Use it as `kvstore_client.connect(fingerprint=model_fingerprint(model))`.

    All weights in memory are hashed, once (135M parameters in f32: some 0.1 s). If `model_id` is given, it replaces
    that hash: the caller then answers for equal ids meaning equal weights. `block_tokens`: 8 by default; for a model
    with recurrent states, a multiple of its chunk. Raises KVStoreError(INVALID) for a model that cannot be stored and
    for other block sizes.
    """
    inner = inner_model(model)
    state = state_of(inner)
    block_tokens = block_size(inner, state, block_tokens)
    return Fingerprint(
        model_name=str(inner.config.name_or_path or type(inner).__name__),
        weights_digest=weights_identity(inner, model_id),
        rope=rope_of(inner.config.get_text_config(decoder=True)),
        kv_dtype=DTYPES[state.dtype],
        layout=_layout(inner, state),
        adapter_digest=_digest(described) if (described := _adapter_state(model, inner)) else "",
        block_tokens=block_tokens,
        engine_block_tokens=block_tokens,
        key_hash=key_hash,
        groups=_groups(state),
    )


def block_size(model: PreTrainedModel, state: State, asked: int | None) -> int:
    """Return the number of tokens of a block: `asked`, or the default for `state`. Raises KVStoreError(INVALID) if the
    model has no recurrent states at the boundaries of such blocks.
    """
    if isinstance(state, KVShape):
        return BLOCK_TOKENS if asked is None else asked
    tokens = state.default_block_tokens() if asked is None else asked
    if tokens % state.chunk:
        raise invalid(
            f"block_tokens={asked} is no multiple of {state.chunk}, the tokens that {type(model).__name__} computes a "
            "recurrent state in at a time"
        )
    return tokens


def _groups(state: State) -> tuple[LayerGroup, ...]:
    if isinstance(state, GroupedState):
        return state.groups
    token_bytes = 2 * state.heads * state.head_dim * state.item_bytes
    layers = tuple(range(state.layers))
    return (LayerGroup(0, layers=layers, bytes_per_token_per_layer=token_bytes, heads=state.heads),)


def _layout(model: PreTrainedModel, state: State) -> str:
    on_device = device_index(model) is not None
    if isinstance(state, KVShape):
        return DEVICE_LAYOUT if on_device else LAYOUT
    release = ".".join(transformers.__version__.split(".")[:2])
    return json.dumps({"order": ENGINE_ORDER, "transformers": release, "device": "cuda" if on_device else "other"})


def difference(session: Fingerprint, model: Any) -> str:
    """Return, as text, how `model` differs from the one that the fingerprint `session` describes, such as "dtype".
    Return "" if it does not differ.
    """
    named = session.weights_digest
    model_id = named.removeprefix(ID_PREFIX).rpartition(":")[0] if named.startswith(ID_PREFIX) else None
    ours = model_fingerprint(model, model_id=model_id, block_tokens=session.block_tokens)
    compared = {
        "weights or configuration": (ours.weights_digest, session.weights_digest),
        "adapters": (ours.adapter_digest, session.adapter_digest),
        "rope": (ours.rope, session.rope),
        "dtype": (ours.kv_dtype, session.kv_dtype),
        "layout": (ours.layout, session.layout),
        "shape": (ours.groups, session.groups),
    }
    return ", ".join(name for name, (here, there) in compared.items() if here != there)


def difference_now(session: Fingerprint, model: Any) -> str:
    """Return as text how `model` differs from the fingerprint `session`, by two checks that are cheap enough to make
    before each token: whether torch wrote to weights, and whether adapters changed. Return "" if neither did.
    """
    inner = inner_model(model)
    known = _hashed.get(inner)
    adapted = _digest(state) if (state := _adapter_state(model, inner)) else ""
    is_same = known is None or list(map(_mark, known.tensors)) == known.marks
    return "" if is_same and adapted == session.adapter_digest else difference(session, model)


def weights_identity(model: PreTrainedModel, model_id: str | None) -> str:
    """Return a text that names the configuration and the weights of `model`. All weights are hashed, unless `model_id`
    stands for them.
    """
    described = config_digest(model)
    if model_id is not None:
        if not is_watched(model):
            watch(model, by_content=False)
        return f"{ID_PREFIX}{model_id}:{described}"
    return f"{weights_digest(model)}:{described}"


def config_digest(model: PreTrainedModel) -> str:
    """Return a digest of the class and the configuration of `model`, as far as its results depend on them."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _NOT_IDENTITY}
    return _digest(
        [type(model).__name__, json.dumps(config, sort_keys=True, default=str), *_other_attention(model.config)]
    )


def torch_identity(model: torch.nn.Module, weights: str = "") -> tuple[str, str, str, dict[str, str]]:
    """Return what the results of a torch `model` depend on beside its input: a digest of its weights, or the name
    `weights` for them; its dtype; the libraries it runs on; and its modules, the configuration of the Transformers
    model inside, adapters and the device.
    """
    inner = next((part for part in model.modules() if isinstance(part, PreTrainedModel)), None)
    first = next(model.parameters(), torch.empty(0))
    settings = {
        "modules": _digest([str(model)]),
        "config": "" if inner is None else config_digest(inner),
        "attention": "" if inner is None else str(getattr(inner.config, "_attn_implementation", "")),
        "adapters": _digest(_adapter_state(model) if inner is None else _adapter_state(model, inner)),
        "device": first.device.type,
    }
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in model.parameters()})
    library = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return weights or weights_digest(model), "+".join(dtypes), library, settings


@dataclass(slots=True)
class _Hashed:
    """A digest, and the tensors it was made of: the address of each, its count of writes, and some of its numbers."""

    tensors: list[torch.Tensor]
    marks: list[tuple[int, int]]
    adapters: list[str]
    samples: bytes
    digest: str


_hashed: WeakKeyDictionary[torch.nn.Module, _Hashed] = WeakKeyDictionary()


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of all parameters and buffers of `model`, which may be a part of a Transformers model or a module
    around one. They are hashed again only if a weight, its file or an adapter has changed.
    """
    known = _hashed.get(model)
    adapters = _adapter_state(model, model)
    named = [*model.named_parameters(), *model.named_buffers()]
    tensors = [tensor for _, tensor in named]
    marks = list(map(_mark, tensors))
    is_same = known is not None and known.adapters == adapters and known.marks == marks
    is_same = is_same and known is not None and known.samples == _samples_of(tensors)
    if known is not None and is_same and _same(known.tensors, tensors) and not written_file(model):
        return known.digest
    watch(model, by_content=True)
    hashing = xxhash.xxh3_128()
    for name, tensor in sorted(named, key=lambda item: item[0]):
        hashing.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        hashing.update(_bytes_of(model, name, tensor))
    digest = hashing.hexdigest()
    if written := written_file(model):
        raise unstorable(model, f"{written} was written to while the weights were hashed")
    _hashed[model] = _Hashed(tensors, marks, adapters, _samples_of(tensors), digest)
    return digest


def note_weights(model: PreTrainedModel, digest: str) -> None:
    """Take `digest` for the digest of the weights of `model`, which are as the caller knows them, until they change."""
    watch(model, by_content=True)
    tensors = [tensor for _, tensor in [*model.named_parameters(), *model.named_buffers()]]
    marks = list(map(_mark, tensors))
    _hashed[model] = _Hashed(tensors, marks, _adapter_state(model, model), _samples_of(tensors), digest)


def _same(known: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    """Return whether these are the very tensors that were hashed: a parameter may have been replaced by another."""
    return len(known) == len(tensors) and all(map(operator.is_, known, tensors))


def _bytes_of(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> Any:
    try:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        return flat.view(torch.uint8).numpy().data if flat.numel() else b""
    except (RuntimeError, TypeError) as error:
        raise unstorable(model, f"{name} cannot be read ({error}); give model_id= instead") from None


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a mark that changes with every in-place change that torch counts; it does not count writes through
    `.data`.
    """
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version


def _samples_of(tensors: list[torch.Tensor]) -> bytes:
    """Return some numbers of each tensor, spread over its dimensions. They reveal most writes that torch does not
    count.
    """
    parts: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type in ("cpu", "cuda"):
            some = tensor.detach()[tuple(slice(None, None, max(1, size // _SAMPLES)) for size in tensor.shape)]
            parts.setdefault((tensor.device, tensor.dtype), []).append(some.reshape(-1))
    try:
        return b"".join(torch.cat(each).cpu().view(torch.uint8).numpy().tobytes() for each in parts.values())
    except (RuntimeError, TypeError):  # tensors of a kind of their own, by a library for quantised weights
        return b""


def _other_attention(config: Any) -> list[str]:
    """Return the attention implementations of a configuration that are not Transformers' own."""
    configs = (config, config.get_text_config(decoder=True))
    names = {str(getattr(each, "_attn_implementation", None) or "eager").removeprefix("paged|") for each in configs}
    return sorted(names - _SAME_ATTENTION)


def _adapter_state(*models: Any) -> list[str]:
    """Return the configured adapters (by PEFT's conventions), and the way each adapted layer uses them now."""
    configured = {id(config): config for model in models if (config := getattr(model, "peft_config", None))}
    if not configured:
        return []
    described = [f"{name}: {config}" for known in configured.values() for name, config in sorted(known.items())]
    for name, layer in models[-1].named_modules():
        if hasattr(layer, "active_adapters") and hasattr(layer, "scaling"):
            used = [getattr(layer, part, None) for part in ("scaling", "disable_adapters", "merged_adapters")]
            described.append(f"{name}: {layer.active_adapters} {used}")
    return described


def _digest(parts: list[str]) -> str:
    return str(xxhash.xxh3_128_hexdigest("\0".join(parts).encode()))


@dataclass(slots=True)
class _Watched:
    files: WeightFiles
    by_content: bool  # any sign of a change has the weights hashed again


_watched: WeakKeyDictionary[torch.nn.Module, _Watched] = WeakKeyDictionary()


def watch(model: torch.nn.Module, *, by_content: bool) -> None:
    """Record the present state of the files from which the weights of `model` are mapped, so that `written_file`
    notices later changes. With `by_content` any sign of a change counts, because the contents are compared afterwards.
    Raises KVStoreError(INVALID) if a file is gone and cannot be opened.
    """
    tensors = [*model.parameters(), *model.buffers()]
    _watched[model] = _Watched(WeightFiles(map(_path_of, _mappings_of(tensors))), by_content)


def is_watched(model: torch.nn.Module) -> bool:
    return model in _watched


def written_file(model: torch.nn.Module) -> str:
    """Return the path of a file of the weights of `model` that was written to since `watch`, or "" if there is none."""
    known = _watched.get(model)
    if known is None:
        return ""
    return known.files.changed(by_content=known.by_content)


def _mappings_of(tensors: Iterable[torch.Tensor]) -> list[Mapping]:
    """Return a mapping of each file that holds some of `tensors`."""
    mappings = sorted(mappings_now(), key=lambda each: each.begin)
    begins = [each.begin for each in mappings]
    found: dict[tuple[int, int, str], Mapping] = {}
    for tensor in tensors:
        if tensor.device.type == "cpu" and tensor.numel():
            first = tensor.data_ptr()
            mapping = mappings[max(bisect.bisect_right(begins, first) - 1, 0)]
            if mapping.begin <= first < mapping.end:
                found[mapping.device, mapping.inode, mapping.path] = mapping
    return [each for each in found.values() if not each.path.startswith(("/memfd:", "/dev/"))]


def _path_of(mapping: Mapping) -> Path:
    """Return a path by which a mapped file can still be opened."""
    if not mapping.path.endswith(DELETED):
        return Path(mapping.path)
    link = Path(f"/proc/self/map_files/{mapping.begin:x}-{mapping.end:x}")  # for the superuser alone
    if not os.access(link, os.R_OK):
        gone = mapping.path.removesuffix(DELETED)
        raise invalid(f"weights are mapped from {gone}, which was replaced or removed: load the model again")
    return link
