"""vLLM's KV caches as it lays them out on devices: pools of every order of axes."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from kvstore_client.hooks.vllm.device_layout import CacheMemory

KV_LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")  # layer, block, head, token, content


def device_caches(memory: npt.NDArray[Any], layout: str, address: int) -> list[CacheMemory]:
    """Each layer's cache of a pool whose axes are in the order of `layout`, as vLLM shows it: [block, head, token,
    content]. `memory` is an array of the pool's shape; the pool itself is at `address`."""
    pool = memory.transpose([layout.index(axis) for axis in "LBHNC"])
    return [
        CacheMemory(address + layer * pool.strides[0], pool.shape[1:], pool.strides[1:], memory.itemsize)
        for layer in range(pool.shape[0])
    ]
