"""The connector reads KV caches, of views that vLLM itself makes: every layout, plain and divided for kernels.

No engine and no device: the views are of host memory, and only their addresses are used as if they were a device's.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here: make test-vllm runs these")

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    SlidingWindowSpec,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from kvstore_connectors.vllm import KVStoreConnector
from kvstore_connectors.vllm.connector import StepMetadata
from kvstore_connectors.vllm.orders import LoadOrder, RequestPrefix, StepOrders
from kvstore_connectors.vllm.tensors import CacheMemory, device_pool, kv_tensors
from tests.reference.device_pool import pieces
from tests.reference.signatures import differences
from tests.reference.vllm_layouts import KV_LAYOUTS
from tests.reference.vllm_records import groups_of

LAYERS, BLOCKS, TOKENS = 3, 5, 32
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)


def views(layout: KVCacheLayout, kernel_tokens: int | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The memory of a pool, and the cache of each layer."""
    layer_stride, block_stride, *_ = compute_layout_strides(SPEC, BLOCKS, LAYERS, layout)
    raw = torch.arange(LAYERS * BLOCKS * SPEC.page_size_bytes, dtype=torch.int32).to(torch.int8)
    names = [f"layer.{number}" for number in range(LAYERS)]
    placed = KVCacheTensor(size=raw.nbytes, layers=names, layer_stride=layer_stride, block_stride=block_stride)
    return raw, create_kv_cache_views(raw, SPEC, BLOCKS, layout, placed, kernel_tokens)


def test_no_layout_of_this_vllm_is_unknown() -> None:
    assert [layout.name for layout in KVCacheLayout] == list(KV_LAYOUTS)


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=KV_LAYOUTS)
def test_a_block_is_where_vllm_has_it(layout: KVCacheLayout) -> None:
    raw, caches = views(layout)
    pool = device_pool(list(map(CacheMemory.of, caches)), blocks=BLOCKS, page_bytes=SPEC.page_size_bytes)
    memory = raw.numpy().view(np.uint8)
    order = [axis for axis in layout.layer_view_order if axis != 0]
    for layer, cache in enumerate(caches):
        for block in range(BLOCKS):
            starts = [(piece.address - raw.data_ptr(), piece.nbytes) for piece in pieces(pool, layer, block)]
            stored = b"".join(memory[start : start + nbytes].tobytes() for start, nbytes in starts)
            inside = cache[block].permute([axis - 1 for axis in order]).contiguous()
            assert stored == inside.view(torch.int8).numpy().tobytes()


def test_blocks_that_kernels_divide_are_the_same_bytes_where_tokens_follow_each_other() -> None:
    raw, whole = views(KVCacheLayout.LBNHC)
    divided = create_kv_cache_views(
        raw, SPEC, BLOCKS, KVCacheLayout.LBNHC, KVCacheTensor(
            size=raw.nbytes, layers=[f"layer.{number}" for number in range(LAYERS)],
            layer_stride=BLOCKS * SPEC.page_size_bytes, block_stride=SPEC.page_size_bytes,
        ), TOKENS // 2,
    )  # fmt: skip
    assert divided[0].shape[0] == 2 * BLOCKS
    pools = [
        device_pool(list(map(CacheMemory.of, caches)), blocks=BLOCKS, page_bytes=SPEC.page_size_bytes)
        for caches in (whole, divided)
    ]
    assert pools[0].layers == pools[1].layers


def test_caches_in_host_memory_are_copied_there() -> None:
    _, caches = views(KVCacheLayout.LBHNC)
    names = [f"layer.{number}" for number in range(LAYERS)]
    group = SimpleNamespace(layer_names=names, kv_cache_spec=SPEC)
    config: Any = SimpleNamespace(kv_cache_groups=[group], num_blocks=BLOCKS)
    found = kv_tensors(dict(zip(names, caches, strict=True)), None, config)
    pages = found.pages(None)  # type: ignore[arg-type]  # it needs no session
    assert (found.device, pages.is_on_device, pages.block_bytes) == (None, False, LAYERS * SPEC.page_size_bytes)
    with pytest.raises(ValueError, match=r"no KV cache of layer layer\.2"):
        kv_tensors(dict(zip(names[:2], caches, strict=False)), None, config)


class RecordingWorker:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def load(self, orders: Any) -> None:
        self.calls.append("load")

    def wait_layer(self, layer: int) -> None:
        self.calls.append(layer)


@pytest.mark.parametrize(
    ("mode", "metadata", "calls"),
    [
        (CUDAGraphMode.NONE, {}, ["load"]),
        (CUDAGraphMode.PIECEWISE, {}, ["load"]),
        (CUDAGraphMode.FULL, {}, ["load", LAYERS - 1]),
        (CUDAGraphMode.NONE, None, ["load", LAYERS - 1]),
    ],
)
def test_before_a_full_graph_is_replayed_the_step_waits_for_all_layers(
    mode: CUDAGraphMode, metadata: Any, calls: list[Any]
) -> None:
    worker, connector = RecordingWorker(), object.__new__(KVStoreConnector)
    connector._worker, connector._layers = worker, {f"layer.{number}": number for number in range(LAYERS)}
    order = LoadOrder("r", RequestPrefix(b""), 0, (1,), 1.0)
    connector.bind_connector_metadata(StepMetadata(StepOrders(loads=(order,))))
    connector.start_load_kv(SimpleNamespace(cudagraph_runtime_mode=mode, attn_metadata=metadata))
    assert worker.calls == calls
    connector.wait_for_layer_load("layer.1")
    assert worker.calls == [*calls, 1]


def test_without_a_worker_half_a_load_of_several_groups_fails_by_its_request() -> None:
    window = SlidingWindowSpec(block_size=TOKENS, num_kv_heads=2, head_size=8, dtype=torch.bfloat16, sliding_window=64)
    connector = object.__new__(KVStoreConnector)
    connector._worker, connector._unserved, connector._groups = None, [], groups_of(window, SPEC)
    order = LoadOrder("r", RequestPrefix(b""), 0, ((1,),), 1.0)
    connector.bind_connector_metadata(StepMetadata(StepOrders(beside=(order,))))
    connector.start_load_kv(None)
    results = connector.get_transfer_results(set())
    assert (results.finished_recving, results.failed_recving) == ({"r"}, {"r"})
    assert connector.get_block_ids_with_load_errors() == set(), "vLLM would end the engine"
    assert supports_hma(KVStoreConnector)


def test_vllm_may_keep_full_graphs() -> None:
    assert KVStoreConnector.requires_piecewise_for_cudagraph({}) is False
    assert issubclass(KVStoreConnector, KVConnectorBase_V1)


def test_the_connector_takes_every_call_of_vllms_abstract_class() -> None:
    assert not inspect.isabstract(KVStoreConnector)
    overridden = [
        name for name in vars(KVStoreConnector) if inspect.isfunction(getattr(KVConnectorBase_V1, name, None))
    ]
    assert KVConnectorBase_V1.__abstractmethods__ <= set(overridden)
    for name in overridden:
        ours, theirs = (inspect.signature(getattr(each, name)) for each in (KVStoreConnector, KVConnectorBase_V1))
        assert not differences(ours, theirs), name
