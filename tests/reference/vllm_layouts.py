"""vLLM's KV caches as it lays them out on devices: pools of every order of axes."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy.typing as npt

from kvstore_connectors.vllm.tensors import CacheMemory

KV_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")  # layer, block, head, token, content


def device_caches(memory: npt.NDArray[Any], layout: str, address: int) -> list[CacheMemory]:
    """Each layer's cache of a pool whose axes are in the order of `layout`, as vLLM shows it: [block, head, token,
    content]. `memory` is an array of the pool's shape; the pool itself is at `address`."""
    pool = memory.transpose([layout.index(axis) for axis in "LBHNC"])
    return [
        CacheMemory(address + layer * pool.strides[0], pool.shape[1:], pool.strides[1:], memory.itemsize)
        for layer in range(pool.shape[0])
    ]


@dataclass
class DeviceTensor:
    """The part of a torch tensor on CUDA device 0 that the connector reads."""

    cache: CacheMemory
    is_cuda = True
    device = SimpleNamespace(index=0)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.cache.shape

    def data_ptr(self) -> int:
        return self.cache.address

    def element_size(self) -> int:
        return self.cache.item_bytes

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self.cache.item_bytes for stride in self.cache.strides)


@dataclass
class KVCaches:
    """The objects that vLLM hands to `kv_tensors`: tensors, its configuration, and the caches' configuration."""

    tensors: dict[str, Any]
    vllm_config: Any
    kv_cache_config: Any


def kv_caches(caches: list[CacheMemory], *, blocks: int, page_bytes: int, backend: str = "FLASH_ATTN") -> KVCaches:
    """Return caches of layers on CUDA device 0, written by that attention backend."""
    tensors = {f"layer.{number}": DeviceTensor(cache) for number, cache in enumerate(caches)}
    attention = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    compilation = SimpleNamespace(static_forward_context=dict.fromkeys(tensors, attention))
    group = SimpleNamespace(layer_names=list(tensors), kv_cache_spec=SimpleNamespace(page_size_bytes=page_bytes))
    return KVCaches(
        tensors,
        SimpleNamespace(compilation_config=compilation),
        SimpleNamespace(kv_cache_groups=[group], num_blocks=blocks),
    )
