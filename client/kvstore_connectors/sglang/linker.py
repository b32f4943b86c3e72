"""SGLang's device pools on kvstored, with no host pool between: a `UnifiedCacheLinker` that its factory loads by name.

    --enable-unified-cache-external-linker --unified-cache-external-linker-backend dynamic
    --unified-cache-external-linker-config '{"linker_module_path": "kvstore_connectors.sglang",
      "linker": "KVStoreLinker", "linker_extra_config": {"socket": "/run/kvstored"}}'

Pages are copied between leases and the pools by `DeviceTransfers`: from host memory or from the daemon's GPU tier,
layer by layer. The module owns the session, the copies and the leases of queued loads. A hit is leased whole, on every
rank, before `load` accepts it; pages that cannot be had are computed. SGLang's own assembler says which device pools a
hybrid model has (0.5.23: DeepSeek V4 and DSA, Mamba beside MLA, Mamba beside full and sliding attention) and refuses
others; a plain cache of one kind, and sliding windows beside full attention, are described here.

An absent daemon or a missing page raises nothing. The module evicts nothing. It needs an NVIDIA GPU.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import (
    DevicePoolEntry,
    DevicePoolGroup,
    resolve_hybrid_device_pool_group,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

from kvstore_client.device import CopyResources, DeviceTransfers, RegisteredMemory
from kvstore_client.entry import connect
from kvstore_client.session import Session
from kvstore_connectors.sglang.layer_loads import (
    HeldPages,
    LayerBatch,
    LayerCounter,
    Offloads,
    PageCopies,
    Ranks,
    SglangDevicePages,
    release,
)
from kvstore_connectors.sglang.pages import KV, BackendMisconfigured, draft_model, is_drafts, namespace
from kvstore_connectors.sglang.stored_pages import PageChains, StoredPages
from kvstore_proto.fingerprint import Fingerprint

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # a server that starts has the time
LOOKUP_S = 0.1  # SGLang asks while it builds a batch
DEADLINE_S = 0.5  # and waits for blocks that come from NVMe
STAGING_BYTES = 64 << 20
_PLAIN = (MHATokenToKVPool, MLATokenToKVPool)  # their subclasses have scales, other indices or other layouts


class KVStoreLinker(UnifiedCacheLinker):  # type: ignore[misc]  # sglang has no types
    """A linker that loads pages from the daemon straight into SGLang's device pools. SGLang loads it by name. The keys
    of `linker_extra_config` are optional: `socket` (directory of the daemon's sockets), `weights_digest`,
    `adapter_digest`, `kv_dtype`, `deadline_s`, `staging_bytes`. Raises ValueError for a model or setting that cannot be
    served.
    """

    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: set[Any],
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        if params.pp_size > 1 or getattr(server_args, "dcp_size", 1) > 1:
            raise BackendMisconfigured("a linker of kvstored runs without pipeline parallelism and without DCP")
        self.forward_stream = forward_stream
        extra = dict(extra_config or {})
        self._deadline_s = float(extra.get("deadline_s", DEADLINE_S))
        self._group = device_pool_group(params, components)
        self.pools = self._group.entry_map
        self._ranks = Ranks(params)
        self._is_writer = not self._group.rank_replicated or self._ranks.tp_rank == 0
        pages = self._device_pages(server_args, params)
        fingerprint = self._fingerprint(server_args, params, pages, extra)
        device = next(iter(pages.values())).entry.kv_buffer[0].device
        self._session = _connect(extra, fingerprint, device.index)
        self._stored = StoredPages(self._session, lambda name: pages[name].form)
        self._registered = RegisteredMemory(self._session.device)
        self._pools = {name: self._copies(each) for name, each in pages.items()}
        self.layer_done_counter = LayerCounter(self._group.num_layers, _current_stream)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._chains = PageChains()
        self._queued: dict[str, list[HeldPages]] = {}
        self._offloads = Offloads()

    def _device_pages(self, server_args: Any, params: Any) -> dict[str, SglangDevicePages]:
        """Return the pages of each device pool. A draft model may have layers in each of the model's own pools."""
        draft = draft_model(server_args)
        is_packed = any(getattr(params, f"mtp_draft_{kind}_pools", ()) for kind in ("device", "mamba"))
        return {
            str(name): SglangDevicePages(entry, draft if is_packed or is_drafts(str(entry.name)) else "")
            for name, entry in self.pools.items()
        }

    def _copies(self, pages: SglangDevicePages) -> PageCopies:
        """Return the copies of a pool, on a stream of its own: a layer of one pool does not wait for all layers of
        another.
        """
        device, pool = self._session.device, pages.pool
        resources = CopyResources(device, pool.block_bytes, registered=self._registered)
        return PageCopies(pages, DeviceTransfers(device, pool, resources=resources))

    def _fingerprint(
        self, server_args: Any, params: Any, pages: dict[str, SglangDevicePages], extra: dict[str, Any]
    ) -> Fingerprint:
        config = HiCacheStorageConfig(
            tp_rank=self._ranks.tp_rank,
            tp_size=self._ranks.tp_size,
            pp_rank=params.pp_rank,
            pp_size=params.pp_size,
            attn_cp_rank=params.attn_cp_rank,
            attn_cp_size=params.attn_cp_size,
            is_mla_model=self._group.rank_replicated,
            enable_storage_metrics=False,
            is_page_first_layout=False,
            model_name=server_args.model_path,
        )
        entry = next(iter(pages.values())).entry
        dtype = str(
            getattr(entry.device_pool, "dtype", entry.kv_buffer[0].dtype)
        )  # a buffer's is the one it is kept in
        return namespace(config, dtype=dtype, layout="device", page_tokens=params.page_size, extra=extra)

    # What is there

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return the lengths, in pages, of all prefixes of the request `rid` that every pool in `transfers` can
        restore. The list is empty while there is no daemon.
        """
        expanded = self._group.resolve_transfers(transfers)
        hashes = [] if not expanded else list(_of_pool(transfers, KV).keys)
        self._chains.saw(hashes)
        if not hashes:
            return []
        return sorted(self._stored.restorable(hashes, expanded, len(hashes), LOOKUP_S)[0])

    # Device pages from leases

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Lease all pages of a hit of the request `rid`, so that the next batch loads them. Return False, on every
        rank, if one rank cannot lease its pages in time; SGLang then computes them.
        """
        expanded = self._group.resolve_transfers(transfers, allow_partial=True, allow_missing_kv=True)
        if not expanded:
            return False
        if rid in self._queued:
            raise RuntimeError(f"a load of request {rid} is queued already")
        try:
            held = self._held(expanded)
        except Exception:  # the other ranks wait for this one's answer
            log.exception("pages cannot be leased")
            held = None
        if not self._ranks.all(held is not None):
            release(held or ())
            return False
        assert held is not None
        self._queued[rid] = held
        return True

    def _held(self, transfers: list[PoolTransfer]) -> list[HeldPages] | None:
        """Return leases on all pages of all pools. None, with nothing held, if a page cannot be had in time."""
        held: list[HeldPages] = []
        ends = time.monotonic() + self._deadline_s
        with ExitStack() as undo:
            undo.callback(release, held)
            for transfer in transfers:
                leases = self._stored.leases(list(transfer.keys), transfer.name, ends - time.monotonic())
                if leases is None:
                    return None
                held.append(HeldPages(str(transfer.name), leases, transfer.host_indices))
            undo.pop_all()
        return held

    def cancel_queued_load(self, rid: str) -> bool:
        held = self._queued.pop(rid, None)
        release(held or ())
        return held is not None

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        held = [pages for each in self._queued.values() for pages in each]
        self._queued.clear()
        ready = torch.cuda.Event()
        ready.record()
        return self.layer_done_counter.add(LayerBatch(held, self._pools, ready))

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    # Device pages into the store

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        expanded = self._group.resolve_transfers(transfers, allow_partial=True)
        if not expanded:
            return False
        if not self._is_writer:  # every rank has the same, and one of them stores it
            self._offloads.put(lambda: True)
            return True
        before = self._chains.before(_of_pool(transfers, KV).keys[0])
        events = self.record_offload_ready()
        self._offloads.put(lambda: self._store(expanded, before, events))
        return True

    def _store(self, transfers: list[PoolTransfer], before: str | None, events: list[Any]) -> bool:
        """Store the pages of all pools; return True if all are stored."""
        for event in events:
            event.synchronize()
        results = [self._store_pool(transfer, before) for transfer in transfers]
        return all(results)

    def _store_pool(self, transfer: PoolTransfer, before: str | None) -> bool:
        name = str(transfer.name)
        pages, transfers = self._pools[name]
        nbytes = pages.pool.block_bytes
        payloads = [transfers.payload_of(page) for page in pages.pages(transfer.host_indices)]
        if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
            return all(self._stored.put(transfer.keys, name, payloads, before=before, nbytes=nbytes))
        return all(  # states at ends of prefixes: none of them needs another
            self._stored.put([key], name, [payload], before=None, nbytes=nbytes) == [True]
            for key, payload in zip(transfer.keys, payloads, strict=True)
        )

    def num_completed_offloads(self) -> int:
        return self._offloads.completed()

    def pop_completed_offload(self) -> bool:
        return self._offloads.pop()

    # End

    def reset(self) -> None:
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self.layer_done_counter.reset()
        self._offloads.settle()

    def close(self) -> None:
        self.reset()
        self._offloads.close()
        for _, transfers in self._pools.values():
            transfers.resources.close()
        self._registered.close()
        self._session.close()


def _connect(extra: dict[str, Any], fingerprint: Fingerprint, device: int) -> Session:
    return connect(
        extra.get("socket"),
        fingerprint=fingerprint,
        client_name="sglang",
        connect_timeout_s=CONNECT_TIMEOUT_S,
        deadline_s=LOOKUP_S,
        staging_bytes=int(extra.get("staging_bytes", STAGING_BYTES)),
        exact=not extra.get("accepts_lossy", False),
        pool=str(extra.get("pool", "")),
        device=device,
    )


def _current_stream() -> int:
    return int(torch.cuda.current_stream().cuda_stream)


def _of_pool(transfers: list[PoolTransfer], pool: str) -> PoolTransfer:
    return next(transfer for transfer in transfers if transfer.name == pool)


def device_pool_group(params: Any, components: set[Any]) -> Any:
    """Return SGLang's DevicePoolGroup of a cache: its pools with their pages and layers. `params` is SGLang's
    CacheInitParams, and `components` are the cache's kinds of layers. Raises ValueError for a cache that cannot be
    copied by pages.
    """
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
    """Return the model's layers by pool, each with its place there."""
    mappings: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (place, is_sliding) in kvcache.layers_mapping.items():
        mappings[bool(is_sliding)][layer - kvcache.start_layer] = place
    return {PoolName.KV: (kvcache.full_kv_pool, mappings[False]), PoolName.SWA: (kvcache.swa_kv_pool, mappings[True])}


def _draft_entry(draft: Any, page_size: int) -> Any:
    """Return the entry of a draft model: its layer i is loaded with layer i of the target; it is read after all
    loads.
    """
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
