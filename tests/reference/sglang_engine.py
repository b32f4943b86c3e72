"""The mock engine behind SGLang's storage interface: its pool is a host pool, its prefixes are hashes of pages.

Stands in for SGLang's cache controller: hash the pages, ask how many are there, get or set them by index. The backend
is made by SGLang's own factory, the way a server makes it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from kvstore_client.testing import EngineSetting, MockEngine
from kvstore_client.testing.mock_engine import PAGE_TOKENS
from tests.reference.sglang_storage import sglang_storage


class HostPool:
    """Token indices over the mock engine's pages, with the methods of SGLang's host pools."""

    dtype = torch.int64
    layout = "page_first"
    page_size = PAGE_TOKENS

    def __init__(self, pages: torch.Tensor) -> None:
        self.pages = pages

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.pages[index // self.page_size]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.pages[0]).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.pages[index // self.page_size] = data_page.reshape(self.pages[0].shape)


class SGLangEngine(MockEngine):
    """An engine with SGLang's cache, as the module describes it."""

    def __init__(self, setting: EngineSetting) -> None:
        super().__init__(setting.model, None)
        self.host_pool = HostPool(torch.from_numpy(self._pool.view("int64")))
        self.backend: Any = None
        if setting.socket_dir is not None:
            # Its rows take no time to compute: else nothing would be loaded.
            self.backend = open_backend(
                self.host_pool, socket=str(setting.socket_dir), extra={"always_load": True}, model_name=setting.model
            )

    def store(self, tokens: Sequence[int]) -> None:
        table = self._allocate(len(tokens))
        try:
            self._compute(table, tokens, 0)
            hashes = page_hashes(tokens)
            if self.backend is not None:
                self.backend.batch_set_v1(hashes, self._indices(table, len(hashes)), None)
        finally:
            self._free += table

    def close(self) -> None:
        if self.backend is not None:
            self.backend.close()

    def _load(self, table: list[int], tokens: Sequence[int]) -> int:
        if self.backend is None:
            return 0
        hashes = page_hashes(tokens[:-1])
        hashes = hashes[: self.backend.batch_exists(hashes)]
        got = self.backend.batch_get_v1(hashes, self._indices(table, len(hashes)), None)
        return (got.index(False) if False in got else len(got)) * PAGE_TOKENS

    def _indices(self, table: list[int], pages: int) -> torch.Tensor:
        starts = torch.tensor(table[:pages], dtype=torch.int64) * PAGE_TOKENS
        return (starts[:, None] + torch.arange(PAGE_TOKENS)).flatten()


def page_hashes(tokens: Sequence[int]) -> list[str]:
    """Chained over full pages, as SGLang's."""
    hashes: list[str] = []
    for start in range(0, len(tokens) // PAGE_TOKENS * PAGE_TOKENS, PAGE_TOKENS):
        page = b"".join(int(token).to_bytes(4, "little") for token in tokens[start : start + PAGE_TOKENS])
        hashes.append(hashlib.sha256((hashes[-1].encode() if hashes else b"") + page).hexdigest())
    return hashes


def storage_config(**fields: Any) -> Any:
    modules = sglang_storage()
    assert modules is not None
    settings: dict[str, Any] = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": True, "model_name": "mock",
    }  # fmt: skip
    return modules[0].HiCacheStorageConfig(**(settings | fields))


def open_backend(host_pool: HostPool, *, socket: str, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Our backend, loaded by SGLang's factory as a server loads it."""
    modules = sglang_storage()
    assert modules is not None
    config = {
        "backend_name": "kvstored", "module_path": "kvstore_connectors.sglang", "class_name": "KVStoreHiCache",
        "interface_v1": 1, "socket": socket, **(extra or {}),
    }  # fmt: skip
    backend = modules[1].StorageBackendFactory.create_backend(
        "dynamic", storage_config(extra_config=config, **fields), host_pool
    )
    backend.register_mem_pool_host(host_pool)
    backend.on_host_pools_registered()
    return backend


def open_sglang_engine(setting: EngineSetting) -> SGLangEngine:
    return SGLangEngine(setting)
