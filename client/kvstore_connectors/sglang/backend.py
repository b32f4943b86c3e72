"""SGLang's HiCache on kvstored: a `HiCacheStorage` that its factory loads by name.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstored",
      "module_path": "kvstore_connectors.sglang", "class_name": "KVStoreHiCache", "interface_v1": 1,
      "hicache_storage_pass_prefix_keys": true}'

The module serves the calls of SGLang's controller; `stored_pages` decides what is stored of a page. Each byte of a page
is copied once, between its host pool and shared memory, in the pool's layout. A hit reports as many leading pages as
are expected to be faster to load than to compute (`choice`). An absent daemon, a full store or a missing page raises
nothing (the results are False, None and 0). The daemon decides about eviction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvstore_client.arrays import LeaseArray
from kvstore_client.entry import connect
from kvstore_client.paths import costs_file
from kvstore_client.payload import FillSlot
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON, Lookup
from kvstore_client.session import Session
from kvstore_connectors.sglang.choice import PageChoice
from kvstore_connectors.sglang.pages import KV, draft_model, is_drafts, namespace
from kvstore_connectors.sglang.stored_pages import StoredPages
from kvstore_proto.errors import KVStoreError
from kvstore_restore.choice import LoadChoice

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # a server that starts has the time
DEADLINE_S = 2.0  # HiCache prefetches in a thread of its own, ahead of need
STAGING_BYTES = 64 << 20
Bytes = npt.NDArray[np.uint8]


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # sglang has no types
    """A storage backend of SGLang's HiCache that keeps pages in the daemon. SGLang loads it by name. The keys of its
    extra config are optional: `socket` (directory of the daemon's sockets), `weights_digest`, `adapter_digest`,
    `kv_dtype`, `deadline_s`, `staging_bytes`, `always_load`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._deadline_s = float(self._extra.get("deadline_s", DEADLINE_S))
        self._session: Session | None = None
        self._stored: StoredPages | None = None
        self._choice = PageChoice(None, page_tokens=1, page_bytes=1)
        self.registered_pools: dict[str, Any] = {}
        self._host: dict[str, HostPages] = {}
        self._draft, self._is_packed = "", False  # a draft model; it has layers in the model's own pools
        self.prefetched_pages = 0
        self.backed_up_pages = 0

    # Set-up and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Connect to the daemon. SGLang calls this with `mem_pool_host`, its host pool of K/V; the fingerprint depends
        on the pool's type, layout and page size.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.register_mem_host_pool_v2(mem_pool_host, KV)
        fingerprint = namespace(
            self._config,
            dtype=str(mem_pool_host.dtype),
            layout=f"{type(mem_pool_host).__name__}/{mem_pool_host.layout}",
            page_tokens=int(mem_pool_host.page_size),
            extra=self._extra,
        )
        self.close()
        self._session = connect(
            self._extra.get("socket"),
            fingerprint=fingerprint,
            client_name="sglang",
            connect_timeout_s=CONNECT_TIMEOUT_S,
            deadline_s=self._deadline_s,
            staging_bytes=int(self._extra.get("staging_bytes", STAGING_BYTES)),
            exact=not self._extra.get("accepts_lossy", False),
            pool=str(self._extra.get("pool", "")),
        )
        self._stored = StoredPages(self._session, self._form)
        self._choice = self._new_choice(self._session, self._host[KV])

    def _new_choice(self, session: Session, pages: HostPages) -> PageChoice:
        learned = None
        if not self._extra.get("always_load", False):
            learned = LoadChoice.load(costs_file(session.fingerprint.digest()))
            session.before_close(learned.save)
        return PageChoice(learned, page_tokens=pages.tokens, page_bytes=pages.nbytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[str(host_pool_name)] = host_pool
        self._is_packed = self._is_packed or _has_draft_layers(host_pool)
        if not self._draft and (self._is_packed or is_drafts(str(host_pool_name))):
            from sglang.srt.runtime_context import get_server_args  # the configuration does not name the draft

            self._draft = draft_model(get_server_args())
        self._host[str(host_pool_name)] = HostPages(host_pool)

    def _form(self, name: str) -> str:
        """Return the text that goes into the page names of a pool beside the fingerprint, which describes the KV pool:
        another pool's form, its rank if that differs, and the draft model that has layers in it.
        """
        draft = f"/{self._draft}" if self._draft and (self._is_packed or is_drafts(name)) else ""
        if name == KV:
            return name + draft
        host_pool = self.registered_pools.get(name)
        form = f"{getattr(host_pool, 'dtype', '')}/{getattr(host_pool, 'layout', '')}"
        sharded = self._config.is_mla_model and name == str(PoolName.MAMBA)
        rank = f"{self._config.tp_rank}/{self._config.tp_size}" if sharded else ""
        return f"{name}/{form}/{rank}{draft}"

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = self._stored = None

    def clear(self) -> bool:
        """Do nothing and return False, because other engines share the pages. The operator clears them with `kvctl
        drop`.
        """
        log.warning("kvstored keeps its blocks: they are shared; `kvctl drop` removes them")
        return False

    def get_stats(self) -> Any:
        """Return the numbers of pages loaded and stored since the last call, as SGLang's StorageMetrics. Return None if
        SGLang does not collect them.
        """
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        metrics = StorageMetrics()
        metrics.prefetch_pgs.append(self.prefetched_pages)
        metrics.backup_pgs.append(self.backed_up_pages)
        self.prefetched_pages = self.backed_up_pages = 0
        return metrics

    # Presence

    def exists(self, key: str) -> bool:
        return self._stored is not None and self._stored.present([key]) == [True]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """Return how many leading pages of `keys` are stored and expected to load faster than they are computed. The
        first page that is not stored ends the count.
        """
        before, found = _prefix(extra_info), self._leading(keys, extra_info)
        return 0 if found is None else self._choice.pages(keys, found, before, found.blocks)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return the longest prefix of the pages `keys` that every pool can restore, each by its own rule, and that is
        expected to load faster than it is computed. The other fields of the result are defined by SGLang.
        """
        before, found = _prefix(extra_info), self._leading(keys, extra_info)
        if found is None or self._stored is None:
            return PoolTransferResult(0, {}, [])
        usable, hits = self._stored.restorable(keys, pool_transfers or [], found.blocks)
        if found.blocks:
            hits = {KV: found.blocks} | hits
        worth = self._choice.pages(keys, found, before, max(usable, default=0))
        usable = {pages for pages in usable if pages <= worth}
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    def _leading(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None) -> Lookup | None:
        """Return which KV pages are stored; None while there is no daemon."""
        names = None if self._stored is None else self._stored.names(keys)
        if names is None or self._stored is None:
            return None
        longest_s = self._choice.question_s(len(keys), _prefix(extra_info), self._deadline_s)
        return self._stored.lookup(names, longest_s)

    # Pages of the main pool, by index into it

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._fetch_pages(KV, keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        prefix = _prefix(extra_info)
        self._choice.stored(keys, prefix)
        return self._store_pages(KV, keys, host_indices, prefix[-1] if prefix else None)

    # Pages of several pools

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {t.name: self._fetch_pages(t.name, t.keys or [], t.host_indices) for t in transfers}

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys, indices = transfer.keys or [], transfer.host_indices
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                results[transfer.name] = self._store_pages(transfer.name, keys, indices, None)
            else:
                results[transfer.name] = self._store_states(transfer.name, keys, indices)
        return results

    def _store_states(self, name: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        """Store states at ends of prefixes; each of them can be restored without another."""
        host = self._host.get(str(name))
        if host is None or indices is None:
            return [False] * len(keys)
        parts = [indices[page * host.tokens : (page + 1) * host.tokens] for page in range(len(keys))]
        return [self._store_pages(name, [key], part, None)[0] for key, part in zip(keys, parts, strict=True)]

    # Tensors that the caller brings

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copy the stored pages `keys` into `target_locations`, contiguous CPU tensors of one page's size. Return the
        tensors, with None for each page that is not stored.
        """
        targets = list(target_locations or [])
        if len(targets) != len(keys):
            return [None] * len(keys)
        filled = self._fetch(KV, keys, lambda page, stored: fill_tensor(targets[page], stored))
        return [target if ok else None for target, ok in zip(targets, filled, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store `values`, tensors of consecutive pages with the hashes `keys`. Return True if all are stored."""
        if values is None or len(values) != len(keys):
            return False
        self._choice.stored(keys, None)
        return all(self._store(KV, keys, [tensor_bytes(value) for value in values], None, None))

    # How it is done

    def _fetch_pages(self, name: str, keys: list[str], indices: torch.Tensor | None) -> list[bool]:
        host = self._host.get(str(name))
        starts = None if host is None else host.starts(indices, len(keys))
        if host is None or starts is None:
            log.error("pool %s: %d pages asked for, and the indices are not of that many", name, len(keys))
            return [False] * len(keys)
        return self._fetch(name, keys, lambda page, stored: host.fill(starts[page], stored))

    def _fetch(self, pool: str, hashes: Sequence[str], fill: Callable[[int, LeaseArray], bool]) -> list[bool]:
        """`fill(page, stored)` for each page that can be had; after a gap it goes on behind it."""
        done = [False] * len(hashes)
        session, stored = self._session, self._stored
        names = None if stored is None else stored.names(hashes, pool)
        if names is None or session is None or stored is None:
            return done
        start, began = 0, time.monotonic()
        longest_s = self._choice.load_s(hashes, self._deadline_s) if pool == KV else self._deadline_s
        try:
            while start < len(hashes) and (left_s := began + longest_s - time.monotonic()) > 0:
                with session.get(keys=names[start:], deadline_s=left_s) as lease:
                    got = [fill(start + block, lease.array(block, kind="bytes")) for block in range(len(lease))]
                    if lease.valid:  # asked after the copy: bytes read before it count
                        done[start : start + len(got)] = got
                start += len(got)
                if start == len(hashes) or lease.reason in (REASON_NO_DAEMON, REASON_DEADLINE):
                    break
                present = stored.present(hashes, pool)
                start = next((index for index in range(start + 1, len(hashes)) if present[index]), len(hashes))
        except (KVStoreError, BufferError) as error:  # BufferError: the lease ended while its pages were copied
            log.warning("pages cannot be fetched: %s", error)
        self.prefetched_pages += sum(done)
        if pool == KV:
            leading = done.index(False) if False in done else len(done)
            self._choice.loaded(hashes, leading, time.monotonic() - began)
        return done

    def _store_pages(self, name: str, keys: list[str], indices: torch.Tensor | None, before: str | None) -> list[bool]:
        host = self._host.get(str(name))
        starts = None if host is None else host.starts(indices, len(keys))
        if host is None or starts is None:
            log.error("pool %s: %d pages given, and the indices are not of that many", name, len(keys))
            return [False] * len(keys)
        return self._store(name, keys, [host.payload(start) for start in starts], before, host.nbytes)

    def _store(
        self, pool: str, hashes: Sequence[str], payloads: Sequence[Any], before: str | None, nbytes: int | None
    ) -> list[bool]:
        if self._stored is None:
            return [False] * len(hashes)
        stored = self._stored.put(hashes, pool, payloads, before=before, nbytes=nbytes)
        self.backed_up_pages += sum(stored)
        return stored


def _has_draft_layers(host_pool: Any) -> bool:
    layers = getattr(host_pool, "layer_num", 0)
    packed = getattr(host_pool, "mtp_draft_device_pools", ()) or getattr(host_pool, "mtp_draft_buffer_infos", ())
    return bool(packed) or layers > getattr(host_pool, "target_layer_num", layers)


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """Return the page names before this call's pages; None if SGLang does not give them."""
    return None if extra_info is None else extra_info.prefix_keys


class HostPages:
    """The pages of one of SGLang's host pools. A page is named by the index of its first token in the pool."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.tokens = int(getattr(pool, "page_size", 1) or 1)
        dummy = pool.get_dummy_flat_data_page()  # pinned memory on a machine with a GPU: made once
        self.nbytes, self._dtype = int(dummy.numel() * dummy.element_size()), dummy.dtype

    def starts(self, indices: torch.Tensor | None, count: int) -> list[int] | None:
        """Return the index of the first token of each of `count` pages. `indices` has the index of every token of the
        pages. Return None if their number does not fit `count` pages.
        """
        if indices is None or indices.numel() != count * self.tokens:
            return None
        return [int(index) for index in indices[:: self.tokens].tolist()]

    def payload(self, start: int) -> FillSlot:
        """Return a payload for `Session.put`: a function that writes the page whose first token has the index
        `start`.
        """

        def write(destination: Bytes) -> None:
            page = self.pool.get_data_page(start, flat=False)
            torch.from_numpy(destination).view(page.dtype).view(page.shape).copy_(page)

        return write

    def fill(self, start: int, stored: LeaseArray) -> bool:
        """Copy the page `stored`, from a lease, into the pool, where its first token has the index `start`. Return
        False if `stored` has not the size of a page of the pool.
        """
        if stored.shape != (self.nbytes,):
            return False
        self.pool.set_from_flat_data_page(start, torch.from_dlpack(stored).view(self._dtype))
        return True


def tensor_bytes(tensor: torch.Tensor) -> Bytes:
    """Return the bytes of `tensor` as uint8[n]. They are a copy if the tensor is not contiguous or not on the CPU."""
    flat: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def fill_tensor(target: torch.Tensor, stored: LeaseArray) -> bool:
    """Copy the page `stored` of a lease into `target`, a contiguous CPU tensor. Return False if the sizes differ."""
    if not target.is_contiguous() or stored.shape != (target.numel() * target.element_size(),):
        return False
    np.copyto(target.view(-1).view(torch.uint8).numpy(), np.asarray(stored))
    return True
