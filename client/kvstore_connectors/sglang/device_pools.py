"""Which device pools a model has in SGLang, and how its linkers name them.

SGLang's own assembler says so for hybrid models (0.5.23: DeepSeek V4 and DSA, Mamba beside MLA, Mamba beside full and
sliding attention) and refuses others. Here: a plain cache of one kind, and sliding windows beside full attention.
Owns nothing, copies nothing.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

from kvstore_connectors.sglang.pages import BackendMisconfigured

_PLAIN = (MHATokenToKVPool, MLATokenToKVPool)  # their subclasses have scales, other indices or other layouts


def device_pool_group(params: Any, components: set[Any]) -> Any:
    """The DevicePoolGroup of a cache. `params` is SGLang's CacheInitParams. Raises ValueError for one that cannot be
    copied by pages."""
    kvcache, page_size = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    if components == {ComponentType.FULL} and type(kvcache) in _PLAIN:
        pools = {PoolName.KV: (kvcache, {layer: layer for layer in range(kvcache.layer_num)})}
    elif components == {ComponentType.FULL, ComponentType.SWA} and _is_plain_swa(kvcache):
        pools = _swa_pools(kvcache)
    else:
        return resolve_hybrid_device_pool_group(
            kvcache=kvcache, page_size=page_size, params=params, components=components
        )
    if params.mtp_draft_device_pools:
        raise BackendMisconfigured("a draft's layers in the target's pool are not supported for this model")
    entries = [_entry(name, pool, mapping, page_size) for name, (pool, mapping) in pools.items()]
    for draft in params.sidecar_draft_device_pools:
        entries.append(_draft_entry(draft, page_size))
    layers = 1 + max(layer for entry in entries for layer in entry.layer_mapping)
    is_replicated = all(type(pool) is MLATokenToKVPool for pool, _ in pools.values())
    return DevicePoolGroup(entries, layers, page_size, rank_replicated=is_replicated and len(entries) == len(pools))


def _is_plain_swa(kvcache: Any) -> bool:
    return type(kvcache) is SWAKVPool and all(
        type(pool) is MHATokenToKVPool for pool in (kvcache.full_kv_pool, kvcache.swa_kv_pool)
    )


def _swa_pools(kvcache: Any) -> dict[Any, Any]:
    """The model's layers by pool, each with its place there."""
    mappings: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (place, is_sliding) in kvcache.layers_mapping.items():
        mappings[bool(is_sliding)][layer - kvcache.start_layer] = place
    return {
        PoolName.KV: (kvcache.full_kv_pool, mappings[False]),
        PoolName.SWA: (kvcache.swa_kv_pool, mappings[True]),
    }


def _draft_entry(draft: Any, page_size: int) -> Any:
    """A draft's layer i comes with layer i of the target; it is read after all loads."""
    if type(draft) is not MHATokenToKVPool:
        raise BackendMisconfigured(f"a draft with a {type(draft).__name__} is not supported")
    mapping = {layer: layer for layer in range(draft.layer_num)}
    return _entry(PoolName.DRAFT, draft, mapping, page_size, indices_from=PoolName.KV)


def _entry(name: Any, pool: Any, mapping: dict[int, int], page_size: int, indices_from: Any = None) -> Any:
    if pool.page_size != page_size:
        raise BackendMisconfigured(f"pool {name} has pages of {pool.page_size} tokens, the tree of {page_size}")
    if type(pool) is MLATokenToKVPool:
        scales, layout, buffers = pool.kv_scale_buffer, "nhd", list(pool.kv_buffer)
        places: dict[int, Any] = dict(mapping)
    else:
        scales, layout, buffers = pool.k_scale_buffer, pool.kv_cache_layout, [*pool.k_buffer, *pool.v_buffer]
        places = {layer: (place, place + len(pool.k_buffer)) for layer, place in mapping.items()}
    if scales is not None or layout not in ("nhd", "hnd"):
        raise BackendMisconfigured(f"pool {name} has scales beside it, or the layout {layout}: that is not supported")
    return DevicePoolEntry(
        name=name,
        indices_from_pool=indices_from or name,
        device_pool=pool,
        components=[buffers],
        layer_mapping=places,
        page_size=page_size,
        rows_are_pages=layout == "hnd",
    )
