"""The contents of vLLM's KV cache, by the names of its specification classes, and their order of bytes.

The module owns the list of kinds that are known to be a state of the prompt's prefix alone, and walks through all
groups: a group may be of one layer or of layers that differ, and the first one need not be attention. The order of keys
and values inside a block is private to the kernels that read it, so the choice of kernels is part of its name; vLLM is
imported only for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

SpecKind = Literal["full", "sliding", "recurrent"]
_KINDS: dict[str, SpecKind] = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SinkFullAttentionSpec": "full",
    "HiddenStateCacheSpec": "full",
    "RSWASpec": "sliding",
    "SlidingWindowSpec": "sliding",
    "SlidingWindowMLASpec": "sliding",
    "ChunkedLocalAttentionSpec": "sliding",
    "MambaSpec": "recurrent",
}
WITHOUT_HYBRID = "--disable-hybrid-kv-cache-manager, if the model runs with it, or use KVStoreTier"
_DIVIDED = ("FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "MambaSpec")
_OTHER_INPUT = ("CrossAttentionSpec", "EncoderOnlyAttentionSpec")


def specs_in(spec: Any) -> list[Any]:
    """Return the specifications in `spec`, a KV cache specification of vLLM. The list has `spec` itself, or the
    specifications of the layers that it contains.
    """
    inside = getattr(spec, "kv_cache_specs", None)
    return list(inside.values()) if isinstance(inside, dict) else [spec]


def unserved_spec(kv_cache_config: Any) -> str:
    """Return a sentence if the connector cannot divide the state of some layers into blocks, given vLLM's
    KVCacheConfig. Return "" if it can.
    """
    if unknown := unknown_spec(kv_cache_config):
        return unknown
    for group in kv_cache_config.kv_cache_groups:
        name = type(group.kv_cache_spec).__name__
        if name not in _DIVIDED:
            return f"{group.layer_names[0]} keeps {name}, which this connector cannot divide: set {WITHOUT_HYBRID}"
    return ""


def all_specs(kv_cache_config: Any) -> Iterator[Any]:
    """Yield the specifications of all groups of layers in vLLM's KVCacheConfig."""
    for group in kv_cache_config.kv_cache_groups:
        yield from specs_in(group.kv_cache_spec)


def kind_of(spec: Any) -> SpecKind | None:
    """Return the kind of state that layers with the specification `spec` keep. Return None if some layers are unknown,
    or of several kinds.
    """
    kinds = {_KINDS.get(type(each).__name__) for each in specs_in(spec)}
    return kinds.pop() if len(kinds) == 1 else None


def unknown_spec(kv_cache_config: Any) -> str:
    """Return a sentence that names a layer whose state cannot be stored, given vLLM's KVCacheConfig. Return "" if all
    can.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "its layers keep no KV cache at all"
    for group in groups:
        if kind_of(group.kv_cache_spec) is None:
            names = sorted({type(spec).__name__ for spec in specs_in(group.kv_cache_spec)})
            kept = f"{group.layer_names[0]} keeps {' and '.join(names)}"
            if set(names) & set(_OTHER_INPUT):
                return f"{kept}, which depends on another input than the tokens"
            return f"{kept}, which is not known to be a state of the prompt alone"
    return ""


def packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return a name for the order of bytes inside vLLM's KV blocks. On a CPU it lists the instruction sets of the
    attention kernels (amx, vec, neon, …), elsewhere the device and the attention settings.
    """
    if vllm_config.device_config.device_type != "cpu":
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        return f"{current_platform.get_device_name()} {capability} {vllm_config.attention_config!r}"
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    sizes = {(spec.block_size, spec.head_size) for spec in all_specs(kv_cache_config) if hasattr(spec, "head_size")}
    isas = sorted({_get_attn_isa(dtype, *size, cache_dtype) for size in sizes})
    return f"{CPUAttentionBackend.get_name()} {' '.join(isas) or 'without attention'}"
