"""vLLM's KV caches give the pool: on which device it is, and which tensors are refused. No torch, and no driver."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_connectors.vllm.tensors import kv_tensors
from tests.reference.vllm_layouts import KVCaches, device_caches, kv_caches

PAGE_BYTES = 2 * 4 * 6 * 2


def given(backend: str = "FLASH_ATTN", page_bytes: int = PAGE_BYTES) -> KVCaches:
    memory = np.zeros((3, 5, 4, 2, 6), np.uint16)
    return kv_caches(device_caches(memory, "LBNHC", 4096), blocks=5, page_bytes=page_bytes, backend=backend)


def test_tensors_on_a_device_name_it_to_the_session() -> None:
    caches = given()
    assert kv_tensors(caches.tensors, caches.vllm_config, caches.kv_cache_config).device == 0


def test_blocks_whose_order_of_bytes_is_not_known_are_refused() -> None:
    for caches, words in ((given(backend="TURBOQUANT"), "TURBOQUANT is not known"), (given(page_bytes=128), "padded")):
        with pytest.raises(ValueError, match=words):
            kv_tensors(caches.tensors, caches.vllm_config, caches.kv_cache_config)


def test_a_layer_without_a_cache_or_without_attention_is_refused() -> None:
    caches = given()
    del caches.vllm_config.compilation_config.static_forward_context["layer.2"]
    with pytest.raises(ValueError, match=r"no attention of layer layer\.2"):
        kv_tensors(caches.tensors, caches.vllm_config, caches.kv_cache_config)
    del caches.tensors["layer.1"]
    with pytest.raises(ValueError, match=r"no KV cache of layer layer\.1"):
        kv_tensors(caches.tensors, caches.vllm_config, caches.kv_cache_config)
