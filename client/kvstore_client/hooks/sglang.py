"""SGLang's HiCache on kvstored: a `HiCacheStorage` that its factory loads by name.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvstored",
      "module_path": "kvstore_client.hooks.sglang", "class_name": "KVStoreHiCache", "interface_v1": 1,
      "hicache_storage_pass_prefix_keys": true}'

Owns the way between the pages of SGLang's host pools and stored blocks; names and prefixes are `sglang_pages`'s. A page
is one opaque block, behind the page before it in its chain, so that a stored prefix loses its end first.
Of a hit as many leading pages are reported as are expected to be faster to load than to compute (`sglang_choice`).
Never does: raise for an absent daemon, a full store or a missing page (False, None and 0 say so), or evict: what is
kept is the daemon's to decide.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.entry import connect
from kvstore_client.hooks.page_keys import PageKeys
from kvstore_client.hooks.sglang_choice import PageChoice
from kvstore_client.hooks.sglang_pages import KV, ending_in, namespace, whole_prefixes
from kvstore_client.paths import costs_file
from kvstore_client.restore.choice import LoadChoice
from kvstore_client.results import REASON_DEADLINE, REASON_NO_DAEMON, Lookup
from kvstore_client.session import Session
from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import BlockKeys

try:
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
except ImportError as missing:
    raise ImportError(f"kvstore_client.hooks.sglang needs SGLang and torch: pip install sglang ({missing})") from None

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0  # a server that starts has the time
DEADLINE_S = 2.0  # HiCache prefetches in a thread of its own, ahead of need
STAGING_BYTES = 64 << 20
Bytes = npt.NDArray[np.uint8]


class KVStoreHiCache(HiCacheStorage):  # type: ignore[misc]  # sglang has no types
    """See the module. Keys of the extra config, all optional: `socket` (directory of the daemon's sockets),
    `weights_digest`, `adapter_digest`, `deadline_s`, `staging_bytes`, `always_load`.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: dict[str, Any] | None = None) -> None:
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        self._deadline_s = float(self._extra.get("deadline_s", DEADLINE_S))
        self._session: Session | None = None
        self._choice = PageChoice(None, page_tokens=1, page_bytes=1)
        self.registered_pools: dict[str, Any] = {}
        self.prefetched_pages = 0
        self.backed_up_pages = 0

    # Set-up and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Only now type, layout and page size are known, and with them what we may share."""
        super().register_mem_pool_host(mem_pool_host)
        self.registered_pools[KV] = mem_pool_host
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
        )
        self._choice = self._new_choice(self._session, mem_pool_host)

    def _new_choice(self, session: Session, pool: Any) -> PageChoice:
        learned = None
        if not self._extra.get("always_load", False):
            learned = LoadChoice.load(costs_file(session.fingerprint.digest()))
            session.before_close(learned.save)
        return PageChoice(learned, page_tokens=int(pool.page_size), page_bytes=_page_bytes(pool))

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools[str(host_pool_name)] = host_pool

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def clear(self) -> bool:
        """False: the pages are shared with other engines, and `kvctl drop` is the operator's."""
        log.warning("kvstored keeps its blocks: they are shared; `kvctl drop` removes them")
        return False

    def get_stats(self) -> Any:
        """Pages moved since the last call, in SGLang's form; None where SGLang does not collect them."""
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
        return self._present([key], KV) == [True]

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        """How many leading pages are there and worth loading; the first gap ends them."""
        names, before = self._names(keys), _prefix(extra_info)
        if names is None:
            return 0
        found = self._lookup(names, self._choice.question_s(len(keys), before, self._deadline_s))
        return self._choice.pages(keys, found, before, found.blocks)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """The longest prefix that all pools can restore, each by its own rule, and that is worth loading."""
        names, before = self._names(keys), _prefix(extra_info)
        if names is None:
            return PoolTransferResult(0, {}, [])
        found = self._lookup(names, self._choice.question_s(len(keys), before, self._deadline_s))
        usable = set(range(1, found.blocks + 1))
        hits: dict[str, int] = {KV: len(usable)} if usable else {}
        for transfer in pool_transfers or []:
            present = self._present(keys, transfer.name)[: max(usable, default=0)]
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                whole = whole_prefixes(present)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                whole = ending_in(present, max(1, len(transfer.keys or ())))
            else:
                log.warning("pool %s asks by the rule %s, which is not known here", transfer.name, transfer.hit_policy)
                whole = set()
            if whole:
                hits[transfer.name] = max(whole)
            usable &= whole
        worth = self._choice.pages(keys, found, before, max(usable, default=0))
        usable = {pages for pages in usable if pages <= worth}
        return PoolTransferResult(max(usable, default=0), hits, sorted(usable))

    # Pages of the main pool, by index into it

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._fetch_pages(KV, keys, host_indices, self.registered_pools.get(KV))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        prefix = _prefix(extra_info)
        self._choice.stored(keys, prefix)
        return self._store_pages(KV, keys, host_indices, self.registered_pools.get(KV), (prefix or [])[-1:])

    # Pages of several pools

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            t.name: self._fetch_pages(t.name, t.keys or [], t.host_indices, self.registered_pools.get(str(t.name)))
            for t in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        results = {}
        for transfer in transfers:
            keys, pool = transfer.keys or [], self.registered_pools.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                results[transfer.name] = self._store_pages(transfer.name, keys, transfer.host_indices, pool, [])
                continue
            results[transfer.name] = [  # states at ends of prefixes: none of them needs another
                self._store_pages(transfer.name, [key], _of_page(transfer.host_indices, page, pool), pool, [])[0]
                for page, key in enumerate(keys)
            ]
        return results

    # Tensors that the caller brings

    def get(
        self, key: str, target_location: torch.Tensor | None = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: list[torch.Tensor] | None = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Fills contiguous CPU tensors of just a page's size; None for each page that is not there."""
        targets = list(target_locations or [])

        def fill(page: int, payload: Bytes) -> bool:
            target = targets[page]
            if not target.is_contiguous() or target.numel() * target.element_size() != len(payload):
                return False
            np.copyto(target.view(-1).view(torch.uint8).numpy(), payload)
            return True

        if len(targets) != len(keys):
            return [None] * len(keys)
        filled = self._fetch(KV, keys, fill)
        return [target if ok else None for target, ok in zip(targets, filled, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], None if value is None else [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Consecutive pages, as SGLang's controller hands them over; True when all are stored."""
        if values is None or len(values) != len(keys):
            return False
        self._choice.stored(keys, None)
        return all(self._store(KV, keys, [_payload(value) for value in values], []))

    # How it is done

    def _names(self, hashes: Sequence[str], pool: str = KV) -> BlockKeys | None:
        """Our keys of these pages; None while there is no daemon, whose part of them we need."""
        if self._session is None or not hashes:
            return None
        secret = self._session.keys([0] * self._session.block_tokens)
        return None if secret is None else PageKeys(secret[0]).of(hashes, self._pool_name(pool))

    def _pool_name(self, pool: str) -> str:
        """KV is what the fingerprint describes; another pool's form, and its rank where that differs, go in here."""
        name = str(pool)
        if name == KV:
            return name
        host_pool = self.registered_pools.get(name)
        form = f"{getattr(host_pool, 'dtype', '')}/{getattr(host_pool, 'layout', '')}"
        sharded = self._config.is_mla_model and name == str(PoolName.MAMBA)
        rank = f"{self._config.tp_rank}/{self._config.tp_size}" if sharded else ""
        return f"{name}/{form}/{rank}"

    def _present(self, hashes: Sequence[str], pool: str) -> list[bool]:
        names = self._names(hashes, pool)
        if names is None:
            return [False] * len(hashes)
        tiers = self._lookup(names).tiers
        return [index < len(tiers) and tiers[index] != "absent" for index in range(len(hashes))]

    def _lookup(self, names: BlockKeys, deadline_s: float | None = None) -> Lookup:
        """A session that is closed, or a daemon that refuses, has nothing."""
        try:
            return Lookup() if self._session is None else self._session.lookup(keys=names, deadline_s=deadline_s)
        except KVStoreError as error:
            log.warning("pages cannot be looked up: %s", error)
            return Lookup()

    def _fetch_pages(self, name: str, keys: list[str], indices: torch.Tensor | None, pool: Any) -> list[bool]:
        pages = _page_indices(indices, len(keys), pool)
        if pages is None:
            log.error("pool %s: %d pages asked for, and the indices are not of that many", name, len(keys))
            return [False] * len(keys)
        dummy = pool.get_dummy_flat_data_page()
        nbytes, dtype = dummy.numel() * dummy.element_size(), dummy.dtype

        def fill(page: int, payload: Bytes) -> bool:
            if len(payload) != nbytes:
                return False
            # torch knows no read-only memory: the pool only reads from this view, and while the lease is held
            whole = (ctypes.c_uint8 * nbytes).from_address(payload.ctypes.data)
            pool.set_from_flat_data_page(pages[page], torch.frombuffer(whole, dtype=torch.uint8).view(dtype))
            return True

        return self._fetch(name, keys, fill)

    def _fetch(self, pool: str, hashes: Sequence[str], fill: Any) -> list[bool]:
        """`fill(page, payload)` for each page that can be had; after a gap it goes on behind it."""
        done = [False] * len(hashes)
        names = self._names(hashes, pool)
        if names is None or self._session is None:
            return done
        start, began = 0, time.monotonic()
        longest_s = self._choice.load_s(hashes, self._deadline_s) if pool == KV else self._deadline_s
        try:
            while start < len(hashes) and (left_s := began + longest_s - time.monotonic()) > 0:
                with self._session.get(keys=names[start:], deadline_s=left_s) as lease:
                    got = [fill(start + block, lease.payload(block)) for block in range(len(lease))]
                    if lease.valid:  # asked after the copy: bytes read before it count
                        done[start : start + len(got)] = got
                start += len(got)
                if start == len(hashes) or lease.reason in (REASON_NO_DAEMON, REASON_DEADLINE):
                    break
                present = self._present(hashes, pool)
                start = next((index for index in range(start + 1, len(hashes)) if present[index]), len(hashes))
        except KVStoreError as error:
            log.warning("pages cannot be fetched: %s", error)
        self.prefetched_pages += sum(done)
        if pool == KV:
            leading = done.index(False) if False in done else len(done)
            self._choice.loaded(hashes, leading, time.monotonic() - began)
        return done

    def _store_pages(
        self, name: str, keys: list[str], indices: torch.Tensor | None, pool: Any, before: list[str]
    ) -> list[bool]:
        pages = _page_indices(indices, len(keys), pool)
        if pages is None:
            log.error("pool %s: %d pages given, and the indices are not of that many", name, len(keys))
            return [False] * len(keys)
        return self._store(name, keys, [_PageOf(pool, page) for page in pages], before, _page_bytes(pool))

    def _store(
        self, pool: str, hashes: Sequence[str], payloads: Sequence[Any], before: list[str], nbytes: int | None = None
    ) -> list[bool]:
        """Store consecutive pages behind the page `before`, or as the start of a chain where that is not stored."""
        names = self._names([*before, *hashes], pool)
        if names is None or self._session is None:
            return [False] * len(hashes)
        if before and not self._lookup(names[:1]).blocks:
            names, before = names[1:], []
        try:
            receipt = self._session.put(keys=names, first_block=len(before), payloads=payloads, payload_bytes=nbytes)
        except KVStoreError as error:  # pages too large for the daemon, a closed session
            log.warning("pages are not stored: %s", error)
            return [False] * len(hashes)
        stored = [status in ("stored", "present") for status in receipt.statuses]
        self.backed_up_pages += sum(stored)
        return stored


class _PageOf:
    """Writes one page of a host pool straight into shared memory, when and if it is wanted."""

    def __init__(self, pool: Any, index: int) -> None:
        self._pool, self._index = pool, index

    def __call__(self, destination: Bytes) -> None:
        np.copyto(destination, _payload(self._pool.get_data_page(self._index, flat=True)))


def _page_bytes(pool: Any) -> int:
    dummy = pool.get_dummy_flat_data_page()
    return int(dummy.numel() * dummy.element_size())


def _prefix(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """The pages before those of a call; None where SGLang does not name them."""
    return None if extra_info is None else extra_info.prefix_keys


def _payload(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor, uint8 [n]; a copy where it is not contiguous or not on the CPU."""
    flat: Bytes = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return flat


def _page_indices(indices: torch.Tensor | None, count: int, pool: Any) -> list[int] | None:
    """Where each page begins in the pool: every page_size-th of its token indices. None if there are not so many."""
    if indices is None or pool is None:
        return None
    page = int(getattr(pool, "page_size", 1) or 1)
    if indices.numel() != count * page:
        return None
    return [int(index) for index in indices[::page].tolist()]


def _of_page(indices: torch.Tensor | None, page: int, pool: Any) -> torch.Tensor | None:
    size = int(getattr(pool, "page_size", 1) or 1)
    return None if indices is None else indices[page * size : (page + 1) * size]
