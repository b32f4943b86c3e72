"""The identity of a loaded `Llama`: the files that it was loaded from, and the fingerprint of its state.

The module names everything that the saved state depends on, except tokens. Invariant: two models with one fingerprint
save states that each of them can go on from.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp

from kvstore_connectors.llama_probe import sketch, window_of
from kvstore_connectors.llama_state import SavedState, StateShape
from kvstore_connectors.weight_files import WeightFiles, mappings_now, process_began, why_unknown
from kvstore_proto.fingerprint import Fingerprint, LayerGroup, StatePart

BLOCK_TOKENS = 64
WINDOW_GROUP = 1  # of windowed layers
STATE_GROUP = 2  # of recurrent layers
_CONTEXT_SETTINGS = (  # what K and V depend on apart from the weights
    "n_ctx",  # some models scale positions by it
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "flash_attn_type",
    "swa_full",
)
_SHARD = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


def fingerprint_of(
    llm: llama_cpp.Llama, probed: SavedState, weights_digest: str, block_tokens: int = BLOCK_TOKENS
) -> Fingerprint:
    """Return the fingerprint of the model `llm`: all that its saved state depends on except tokens, with llama.cpp's
    version. `weights_digest` names the weights, and a stored block has `block_tokens` tokens. `probed` is the
    model's state of the first probe tokens; a sketch of its numbers covers what no setting shows, such as a rotation
    of K and V.
    """
    params, shape = llm.context_params, probed.shape
    context = {name: _plain(getattr(params, name)) for name in _CONTEXT_SETTINGS if hasattr(params, name)}
    context["n_ctx"] = llm.n_ctx()  # as it came out: llama.cpp rounds it
    context["kv_overrides"] = repr(llm.kv_overrides)
    groups = [_group(shape, LayerGroup(0))] if shape.keys else []
    if shape.window is not None:
        groups.append(_group(shape.window, LayerGroup(WINDOW_GROUP, "sliding", window_of(llm))))
    if shape.recurrent_bytes:  # one piece that only llama.cpp reads
        part = StatePart("state", "u8", (shape.recurrent_bytes,))
        groups.append(LayerGroup(STATE_GROUP, "recurrent", layers=(0,), parts=(part,)))
    return Fingerprint(
        Path(llm.model_path).stem,
        weights_digest=weights_digest,
        rope=json.dumps(context, sort_keys=True),
        kv_dtype=f"ggml types {shape.types}",
        layout=f"{shape.layout} by llama-cpp-python {llama_cpp.__version__}, sketch {sketch(probed)}",
        tokenizer_digest="the model's",
        adapter_digest=f"{file_digest(Path(llm.lora_path))} {llm.lora_scale}" if llm.lora_path else "",
        block_tokens=block_tokens,
        engine_block_tokens=block_tokens,
        groups=tuple(groups),
    )


def _group(shape: StateShape, group: LayerGroup) -> LayerGroup:
    """Return `group` with its layers, counted in its own cache, and their size. Where they have different sizes, each
    put gives the size of its payloads.
    """
    if len(set(shape.layer_bytes)) > 1:
        return group
    return replace(group, layers=tuple(range(len(shape.keys))), bytes_per_token_per_layer=shape.layer_bytes[0])


def loaded_files(llm: llama_cpp.Llama, *, is_named: bool) -> WeightFiles:
    """Return the files that `llm` was loaded from, open. Raises ValueError if the path may lead to other files by now,
    unless `is_named`: the caller has named the weights.
    """
    paths = _parts(Path(llm.model_path)) + ([Path(llm.lora_path)] if llm.lora_path else [])
    try:
        files = WeightFiles(paths)
    except OSError as error:
        raise ValueError(f"the model's file cannot be read again for its digest: {error}") from None
    unknown = "" if is_named else why_unknown(files, mappings_now(), process_began())
    if unknown:
        raise ValueError(f"{unknown} (or give weights_digest=)")
    return files


def file_digest(path: Path) -> str:
    """Return the digest of the model file at `path`. For one part of a split model it is the digest of all parts."""
    return WeightFiles(_parts(path)).digest()


def _parts(path: Path) -> list[Path]:
    split = _SHARD.search(path.name)
    if split is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: split.start()]}-*-of-{split[1]}.gguf"))


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str)) else repr(value)
