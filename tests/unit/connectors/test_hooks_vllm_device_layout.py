"""Blocks have their place in KV caches on a device: each order of axes that vLLM has, and what has
no place in a pool.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_client import KVStoreError
from kvstore_connectors.vllm.model import model_fingerprint
from kvstore_connectors.vllm.tensors import CacheMemory, device_pool
from tests.reference.device_pool import pieces
from tests.reference.leased_memory import lease_over
from tests.reference.vllm_layouts import KV_LAYOUTS, device_caches
from tests.unit.connectors.test_hooks_vllm_model import configuration

SIZES = {"L": 3, "B": 5, "H": 2, "N": 4, "C": 6}
PAGE_BYTES = 2 * 4 * 6 * 2
PARTS = {"LBHNC": 1, "LBNHC": 1, "LHBNC": 2, "BLHNC": 1, "BLNHC": 1, "BHLNC": 2}


def memory_of(layout: str, **sizes: int) -> np.ndarray:
    """[axis, ...] in the order of the layout, each element another number."""
    shape = [(SIZES | sizes)[axis] for axis in layout]
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def block_of(memory: np.ndarray, layout: str, block: int) -> bytes:
    """All layers of a block, a layer as its axes follow each other in memory."""
    layers = np.moveaxis(memory, [layout.index("L"), layout.index("B")], [0, 1])
    return layers[:, block].tobytes()


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_the_parts_of_a_page_are_its_bytes_in_the_order_of_the_memory(layout: str) -> None:
    assert set(PARTS) == set(KV_LAYOUTS)
    memory = memory_of(layout)
    address = memory.ctypes.data
    pool = device_pool(device_caches(memory, layout, address), blocks=5, page_bytes=PAGE_BYTES)
    assert (pool.pages, pool.layer_bytes, {len(parts) for parts in pool.layers}) == (5, PAGE_BYTES, {PARTS[layout]})
    flat, used = memory.view(np.uint8).reshape(-1), np.zeros(memory.nbytes, int)
    for block in range(5):
        found = [piece for layer in range(3) for piece in pieces(pool, layer, block)]
        assert [piece.offset for piece in found] == [at * found[0].nbytes for at in range(len(found))]
        places = [slice(piece.address - address, piece.address - address + piece.nbytes) for piece in found]
        assert b"".join(flat[place].tobytes() for place in places) == block_of(memory, layout, block)
        for place in places:
            used[place] += 1
    assert (used == 1).all(), "every byte of the memory belongs to one page"


@pytest.mark.parametrize("layout", KV_LAYOUTS)
def test_a_stored_block_has_arrays_of_k_and_v_whatever_the_order(layout: str) -> None:
    vllm_config, caches = configuration()
    vllm_config.device_config.device_type = "cuda"
    caches.kv_cache_layout, group = layout, caches.kv_cache_groups[0]
    spec, group.layer_names = group.kv_cache_spec, group.layer_names[:3]
    spec.block_size, spec.num_kv_heads, spec.head_size, spec.page_size_bytes = 4, 2, 3, PAGE_BYTES
    spec.dtype = "torch.float16"
    memory = memory_of(layout)
    fingerprint = model_fingerprint(vllm_config, caches, weights="w", packing="FLASH_ATTN", version="0.33.0", rank=0)
    lease, _ = lease_over(fingerprint, [np.frombuffer(block_of(memory, layout, 2), np.uint8)])
    content = memory.transpose([layout.index(axis) for axis in "BLNHC"])[2]
    for kind, part in (("k", content[..., :3]), ("v", content[..., 3:])):
        assert np.array_equal(np.asarray(lease.array(0, kind=kind)).view(np.uint16), part)
        assert np.array_equal(np.asarray(lease.array(0, 1, kind=kind)).view(np.uint16), part[1])
    vllm_config.device_config.device_type = "cpu"
    on_cpu = model_fingerprint(vllm_config, caches, weights="w", packing="CPU_ATTN vec", version="0.33.0", rank=0)
    with pytest.raises(KVStoreError, match="its layout names no order of bytes"):
        lease_over(on_cpu, [np.zeros(on_cpu.payload_bytes(), np.uint8)])[0].array(0, kind="k")


def test_one_head_has_strides_that_mean_nothing() -> None:
    (cache,) = device_caches(memory_of("LHBNC", L=1, H=1), "LHBNC", 4096)
    odd = CacheMemory(cache.address, cache.shape, (cache.strides[0], 7, *cache.strides[2:]), cache.item_bytes)
    (parts,) = device_pool([odd], blocks=5, page_bytes=PAGE_BYTES // 2).layers
    assert [(part.address, part.stride, part.nbytes) for part in parts] == [(4096, 48, 48)]


def halved(cache: CacheMemory) -> CacheMemory:
    """Return the caches as kernels see them that take half as many tokens in a block."""
    (blocks, heads, tokens, content), strides = cache.shape, cache.strides
    shape, by_token = (2 * blocks, heads, tokens // 2, content), strides[1] < strides[2]
    return CacheMemory(
        cache.address, shape, (strides[0] // 2, strides[1] if by_token else strides[1] // 2, *strides[2:]),
        cache.item_bytes,
    )  # fmt: skip


def test_blocks_that_kernels_divide_are_whole_where_their_tokens_follow_each_other() -> None:
    whole = device_caches(memory_of("LBNHC"), "LBNHC", 4096)
    pools = [device_pool(caches, blocks=5, page_bytes=PAGE_BYTES) for caches in (whole, list(map(halved, whole)))]
    assert pools[0].layers == pools[1].layers
    by_heads = list(map(halved, device_caches(memory_of("LBHNC"), "LBHNC", 4096)))
    with pytest.raises(ValueError, match="a block as 2 smaller ones, each ordered by heads: divide --block-size by 2"):
        device_pool(by_heads, blocks=5, page_bytes=PAGE_BYTES)


@pytest.mark.parametrize(
    ("cache", "words"),
    [
        (CacheMemory(4096, (2, 5, 4, 2, 6), (960, 192, 48, 24, 4), 2), "the shape .* is expected"),
        (CacheMemory(4096, (7, 2, 4, 6), (96, 48, 12, 2), 2), "the shape .* is expected"),
        (CacheMemory(4096, (5, 2, 4, 5), (96, 48, 12, 2), 2), "80 bytes of 96: padded pages"),
        (CacheMemory(4096, (5, 2, 4, 6), (96, 40, 12, 2), 2), "overlaps itself"),
        (CacheMemory(4096, (5, 2, 4, 6), (48, 48, 12, 2), 2), "overlaps itself"),
    ],
)
def test_what_has_no_place_in_a_pool_is_refused(cache: CacheMemory, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        device_pool([cache], blocks=5, page_bytes=PAGE_BYTES)


def test_layers_that_share_memory_are_refused() -> None:
    caches = device_caches(memory_of("LBNHC"), "LBNHC", 4096)
    with pytest.raises(ValueError, match="share KV memory"):
        device_pool([*caches, caches[0]], blocks=5, page_bytes=PAGE_BYTES)
