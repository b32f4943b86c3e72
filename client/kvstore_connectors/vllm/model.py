"""The fingerprint of a vLLM engine: everything that the bytes of a block depend on apart from its prefix.

The module decides which of vLLM's settings count, which configurations cannot be served, and which files of a model are
its weights; it hashes these and remembers the results. It reads the configuration by attribute. A forgotten setting
would serve garbage, so whole records go in rather than fields: the model's complete Hugging Face configuration, the
cache specification, the kernel's own name for its packing, vLLM's version (the order of bytes inside a block is private
to vLLM).

Weights count by content: two checkpoints that differ in one value never share a block. Files in a Hugging Face cache
are named by their sha256 already, and that name is used; others are read once with xxh3 (as fast as the page cache
gives them) and remembered by path, size, inode and time of change. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Collection, Iterable
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from kvstore_client.paths import cache_directory, write_json
from kvstore_connectors.vllm.groups import StateGroups, state_groups
from kvstore_connectors.vllm.identity import Extras, MediaItem
from kvstore_connectors.vllm.specs import WITHOUT_HYBRID, unserved_spec
from kvstore_connectors.vllm.stored_weights import FORMAT, objects_digest
from kvstore_connectors.weight_files import WeightFiles, process_began, why_unknown
from kvstore_proto.arena import MAX_TOKENS
from kvstore_proto.fingerprint import Fingerprint, LayerGroup, StatePart
from kvstore_proto.kv_layout import HEAD_PAIRS_ORDER, PAIRS_ORDER

_NAMES_ONLY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "_commit_hash")
_READABLE_FORMATS = ("auto", "hf", "safetensors", "pt", "gguf")
# On CUDA a block of these backends and types is K, then V, for each head and token, in the order of axes that the
# fingerprint names. Others add scales, pack elements, or have an order of their own.
_CUDA_BACKENDS = frozenset({"FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION"})
_CUDA_CACHES = frozenset({"auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"})
_OWN_PACKING = ("num_head_slots", "state_content_bytes")  # of a specification whose page is not K and V of each head
PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_SHA256_NAME = re.compile(r"[0-9a-f]{64}")


def refusal(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return a sentence if an engine with this configuration cannot be served, and what to do about it. Return "" if it
    can.
    """
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    groups = kv_cache_config.kv_cache_groups
    device = vllm_config.device_config.device_type
    if device not in ("cpu", "cuda"):
        return f"its KV cache is in {device} memory, and this connector copies that of CPUs and of CUDA devices only"
    if device == "cuda" and str(cache.cache_dtype) not in _CUDA_CACHES:
        return f"the order of bytes in a {cache.cache_dtype} KV cache is not known: set --kv-cache-dtype auto"
    if device == "cuda" and getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "sleep mode takes the KV memory away while blocks are stored from it: unset --enable-sleep-mode"
    if unserved := unserved_spec(kv_cache_config):
        return unserved
    spec = groups[0].kv_cache_spec
    if refused := _refused_groups(vllm_config, state_groups(kv_cache_config)):
        return refused
    if device == "cuda" and any(getattr(spec, name, None) is not None for name in _OWN_PACKING):
        return "its kernels pack blocks in an order of their own, which is not known: set another --attention-backend"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism is not supported: set --pipeline-parallel-size 1"
    if getattr(parallel, "decode_context_parallel_size", 1) > 1 or (
        getattr(parallel, "prefill_context_parallel_size", 1) > 1
    ):
        return "context parallelism is not supported: set its sizes to 1"
    if getattr(cache, "calculate_kv_scales", False):
        return (
            "KV scales computed from the first prompt make every process's bytes different: unset calculate_kv_scales"
        )
    return ""


def _refused_groups(vllm_config: Any, groups: StateGroups) -> str:
    """Return why these groups of layers cannot be served; "" if they can."""
    device = vllm_config.device_config.device_type
    if groups.block_tokens > MAX_TOKENS:
        return f"blocks of {groups.block_tokens} tokens are over the limit of {MAX_TOKENS}: set a smaller --block-size"
    if device == "cuda" and type(groups.groups[0].spec).__name__ == "MLAAttentionSpec":
        return "its layers keep MLAAttentionSpec caches, which this connector copies in host memory only"
    if groups.is_plain:
        return ""
    kinds = " and ".join(dict.fromkeys(group.kind for group in groups.groups))
    if device == "cuda":
        return (
            f"its layers keep several kinds of state ({kinds}), which this connector copies in host memory only: set "
            f"{WITHOUT_HYBRID}"
        )
    if getattr(vllm_config, "speculative_config", None) is not None:
        return f"its layers keep {kinds} state, and it guesses tokens: unset --speculative-config"
    modes = {getattr(group.spec, "mamba_cache_mode", "") for group in groups.groups if group.kind == "recurrent"}
    if modes - {"align"}:
        return (
            "its recurrent layers keep no state at ends of blocks: set --enable-prefix-caching (mamba_cache_mode align)"
        )
    return ""


def refused_backends(names: Collection[str]) -> str:
    """Return a sentence if one of the attention backends `names` is not known to write KV blocks on a CUDA device in a
    supported order. Return "" if all are known.
    """
    unknown = sorted(set(names) - _CUDA_BACKENDS)
    if unknown:
        return f"the order of bytes in blocks of {', '.join(unknown)} is not known: set --attention-backend FLASH_ATTN"
    return ""


def model_fingerprint(
    vllm_config: Any, kv_cache_config: Any, *, weights: str, packing: str, version: str, rank: int
) -> Fingerprint:
    """Return the fingerprint of one rank of an engine, from vLLM's configuration. `weights` names the weights,
    `packing` is a name for the order of bytes inside a block, `version` is vLLM's version, and `rank` the
    tensor-parallel rank.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    groups = state_groups(kv_cache_config)
    first = groups.groups[0]
    spec = first.spec
    device = str(vllm_config.device_config.device_type)
    layout = {
        "engine": f"vllm {version}",
        "packing": packing,
        "memory": str(kv_cache_config.kv_cache_layout),
        "compute": _dtype(model.dtype),
        "cache": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "layers": first.layer_count,
        "page_bytes": first.page_bytes,
        **({"heads": f"{spec.num_kv_heads}x{spec.head_size}"} if first.kind != "recurrent" else {}),
        **({"device": device, "order": _order(spec, kv_cache_config)} if device != "cpu" else {}),
        **({} if groups.is_plain else _hybrid(groups)),
        **rope_by_length(model),
    }
    return Fingerprint(
        model_name=str(model.model),
        weights_digest=weights,
        rope=f"config {model_digest(model)}",
        kv_dtype=_dtype(getattr(spec, "dtype", model.dtype)),
        layout=json.dumps(layout, sort_keys=True, separators=(",", ":")),
        shard_index=rank,
        shard_count=vllm_config.parallel_config.tensor_parallel_size,
        block_tokens=groups.block_tokens,
        engine_block_tokens=groups.block_tokens,
        key_hash="blake2b",
        groups=_layer_groups(groups),
    )


def _hybrid(groups: StateGroups) -> dict[str, Any]:
    """Return what the fingerprint says beside the first group. Engines with vLLM's hybrid manager and without it differ
    in the last bits of what they compute, and share nothing.
    """
    described = [[group.members, group.layers, repr(group.spec)] for group in groups.groups]
    return {"hybrid_manager": True, "groups": digest_of(described)}


def _layer_groups(groups: StateGroups) -> tuple[LayerGroup, ...]:
    """Return the fingerprint's groups; one whose bytes cannot be divided by tokens leaves its size open."""
    found, layer = [], 0
    for group in groups.groups:
        layers = tuple(range(layer, layer + group.layer_count))
        layer += group.layer_count
        if group.kind == "recurrent":
            state = StatePart("state", "u8", (group.page_bytes,))
            found.append(LayerGroup(group.number, group.kind, layers=layers, parts=(state,)))
            continue
        each, odd = divmod(group.page_bytes, int(group.spec.block_size))
        kind = "latent" if type(group.spec).__name__ == "MLAAttentionSpec" else group.kind
        heads = int(group.spec.num_kv_heads) if kind == "full" and groups.is_plain else 0
        stored = LayerGroup(group.number, kind, group.window_tokens, layers, each, heads)
        found.append(LayerGroup(group.number, kind, group.window_tokens) if odd else stored)
    return tuple(found)


def _order(spec: Any, kv_cache_config: Any) -> str:
    """Return the order of bytes in a block on a device, for `kv_layout`; "" where K and V differ in size."""
    if getattr(spec, "head_size_v", spec.head_size) != spec.head_size:
        return ""
    axes = str(kv_cache_config.kv_cache_layout)  # letters: layer, block, head, token (N), content
    return PAIRS_ORDER if axes.find("N") < axes.find("H") else HEAD_PAIRS_ORDER


def model_digest(model: Any) -> str:
    """Return a digest of the complete Hugging Face configuration of `model`, vLLM's ModelConfig."""
    return digest_of(_model_settings(model))


def rope_by_length(model: Any) -> dict[str, Any]:
    """Return {"max_model_len": tokens} if `model` scales its positions by the longest prompt, and {} otherwise."""
    settings = json.dumps(_model_settings(model), default=str)
    if '"longrope"' in settings or '"su"' in settings:
        return {"max_model_len": model.max_model_len}  # vLLM chooses the short or the long factors by it
    return {}


def find_weights(vllm_config: Any, stated: str, memory: Path | None = None) -> str:
    """Return a text that names the weights that vLLM loaded: `stated` if it is given, the digest of their object, or a
    digest of the weight files. Digests of files are remembered in the file `memory`. Raises ValueError, with a
    sentence, if there is nothing to read, or if files changed after this process began, so that it may have loaded
    other bytes.
    """
    if stated:
        return f"stated {stated}"
    model, load = vllm_config.model_config, vllm_config.load_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if load_format == FORMAT:
        return objects_digest(load, vllm_config.parallel_config.world_size)
    remedy = 'say what they are: kv_connector_extra_config={"weights_digest": "<a name that changes with the weights>"}'
    if load_format not in _READABLE_FORMATS:
        raise ValueError(f"weights loaded by load_format={load_format!r} cannot be read as files; {remedy}")
    source = getattr(model, "model_weights", "") or model.model
    location = Path(source)
    if not location.exists():
        location = _hub_snapshot(str(source), model.revision, load.download_dir)
    elif unknown := loaded_others(weight_files(location), process_began()):
        raise ValueError(f"{unknown}; start the engine again, or {remedy}")
    digest = weights_digest(location, memory or default_memory())
    if not digest:
        raise ValueError(f"no weight files were found at {location}; {remedy}")
    return digest


def hashes_items(vllm_config: Any) -> bool:
    """Return whether vLLM names images by a hash of their content. It does not if both of its multimodal caches are
    turned off.
    """
    multimodal = vllm_config.model_config.multimodal_config
    has_items_cache = multimodal and multimodal.mm_processor_cache_gb > 0
    return bool(vllm_config.cache_config.enable_prefix_caching or has_items_cache)


def describe_extras(request: Any, *, hashed_items: bool) -> Extras | str:
    """Return everything that the blocks of `request` depend on apart from tokens. If something in the request cannot be
    named, return a sentence that says so. `hashed_items` is True if vLLM names images by a hash of their content.
    """
    if request.prompt_embeds is not None or request.prompt_token_ids is None:
        return "its prompt has embeddings in place of tokens"
    if request.resumable:
        return "its prompt may still be changed by its sender"
    items = []
    for feature in request.mm_features:
        if not hashed_items or not feature.identifier:
            return "its images are not hashed: turn prefix caching or the multi-modal processor cache on"
        items.append(MediaItem(feature.identifier, feature.mm_position.offset, feature.mm_position.length))
    adapter = ""
    if request.lora_request is not None:
        if getattr(request.lora_request, "load_inplace", False):
            return "its adapter may be replaced while it is loaded"
        adapter = _adapter_digest(request.lora_request.lora_int_id, request.lora_request.lora_path)
        if not adapter:
            return "its adapter's files cannot be read"
    return Extras(adapter, request.cache_salt or "", tuple(items))


@cache
def _adapter_digest(number: int, path: str) -> str:
    """Return the digest of the adapter as it was when this process first met it: vLLM keeps the adapter it loaded, even
    if the file changes. "" if it cannot be read.
    """
    try:
        return combined_digest(_adapter_files(path), default_memory())
    except OSError:
        return ""


def _adapter_files(path: str) -> list[Path]:
    folder = Path(path)
    weights = weight_files(folder) if folder.exists() else []
    return [*weights, *sorted(folder.glob("adapter_config.json"))] if weights else []


def _hub_snapshot(name: str, revision: str | None, download_dir: str | None) -> Path:
    from huggingface_hub import snapshot_download  # vLLM depends on it and has downloaded the model by now

    return Path(snapshot_download(name, revision=revision, cache_dir=download_dir, local_files_only=True))


def _model_settings(model: Any) -> dict[str, Any]:
    described = dict(model.hf_config.to_dict())
    for name in _NAMES_ONLY:
        described.pop(name, None)
    return described


def digest_of(described: Any) -> str:
    """Return a digest of `described`, a value that JSON can represent."""
    text = json.dumps(described, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def weights_digest(location: Path, memory: Path | None = None) -> str:
    """Return the digest of the weights in the directory or file `location`, or "" if it has none. Digests are
    remembered in the file `memory`.
    """
    return combined_digest(weight_files(location), memory)


def weight_files(location: Path) -> list[Path]:
    """Return the weight files at `location`. A directory may have the weights in several formats; the first format in
    `PATTERNS` counts.
    """
    if location.is_file():
        return [location]
    for pattern in PATTERNS:
        found = sorted(location.glob(pattern))
        if found:
            return found
    return []


def loaded_others(files: Iterable[Path], began: float) -> str:
    """Return a sentence if a process that began at `began` (Unix time, in seconds) may have loaded other bytes than
    `files` have now. Return "" if it cannot have.

    vLLM copies weights, so later changes of a file do not matter. Files in a Hugging Face cache are named by their
    content, and as old as their download.
    """
    outside = [file for file in files if not _is_named_by_content(file.resolve())]
    with closing(WeightFiles(outside)) as opened:
        return why_unknown(opened, [], began)


def combined_digest(files: Iterable[Path], memory: Path | None = None) -> str:
    """Return a digest of `files`, by name and content, or "" for no files. Digests are remembered in the file
    `memory`.
    """
    lines = [f"{file.name}:{_file_digest(file, memory)}" for file in files]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest() if lines else ""


def default_memory() -> Path:
    """Return the path of the file that remembers digests of weights: `weights.json` in the cache directory."""
    return cache_directory() / "weights.json"


def _file_digest(file: Path, memory: Path | None) -> str:
    real = file.resolve()
    if _is_named_by_content(real):
        return real.name
    state = real.stat()
    slot = f"{real}:{state.st_size}:{state.st_ino}:{state.st_mtime_ns}:{state.st_ctime_ns}"
    known = _remembered(memory)
    if slot in known:
        return known[slot]
    with closing(WeightFiles([real])) as files:
        digest = files.digest()
        if files.changed():
            raise ValueError(f"{file} was written to while it was digested: start the engine again")
    _remember(memory, slot, digest)
    return digest


def _is_named_by_content(real: Path) -> bool:
    return real.parent.name == "blobs" and _SHA256_NAME.fullmatch(real.name) is not None


def _remembered(memory: Path | None) -> dict[str, str]:
    if memory is None:
        return {}
    with contextlib.suppress(OSError, ValueError, RecursionError):
        known = json.loads(memory.read_text())
        if isinstance(known, dict):
            return {str(slot): str(digest) for slot, digest in known.items()}
    return {}


def _remember(memory: Path | None, slot: str, digest: str) -> None:
    if memory is not None:
        write_json(memory, {**_remembered(memory), slot: digest})
