"""vLLM's name for the order of keys and values inside a block: that of the kernels that will read it.

Asks vLLM, which is imported here only when asked. The order is private to the kernels, so what decides which kernels
run is part of the name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore_connectors.vllm.specs import all_specs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def packing(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """Return, on CPUs, the instruction sets that the kernels of the attention layers are for: amx, vec, vec16, neon, …;
    elsewhere the device, and what was set for attention."""
    if vllm_config.device_config.device_type != "cpu":
        from vllm.platforms import current_platform

        capability = current_platform.get_device_capability()
        return f"{current_platform.get_device_name()} {capability} {vllm_config.attention_config!r}"
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    sizes = {(spec.block_size, spec.head_size) for spec in all_specs(kv_cache_config) if hasattr(spec, "head_size")}
    isas = sorted({_get_attn_isa(dtype, *size, cache_dtype) for size in sizes})
    return f"{CPUAttentionBackend.get_name()} {' '.join(isas) or 'without attention'}"
