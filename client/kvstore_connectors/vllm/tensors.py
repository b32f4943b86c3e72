"""vLLM's KV caches, as tensors, and the pool that the worker side copies: in host memory, or on a CUDA device.

The module chooses between the two (host memory: `host_pages`), and owns the transfers of a pool on a device. It refuses
tensors whose bytes it cannot name. A storage block is a pool block of every layer, layers in order; where vLLM has
several groups, of every layer of one of the store's. The module never looks inside a block: vLLM's CPU kernels pack
keys and values in an order of their own instruction set, so no slice of a block means anything elsewhere (the
fingerprint names the order). torch is imported on first use.

On a device vLLM 0.32 and 0.33 show the cache of each layer as [block, head, token, content] (`KVCacheLayout`); in
memory layers, blocks, heads and tokens may come in another order. A block's bytes are stored in their order in memory,
which the fingerprint names; heads that are apart in memory are several parts of a page. The driver copies beside the
engine's stream, which itself waits for a layer. The engine's thread waits for the daemon's answer and until copies are
queued, never for a copy, except at the end of a step that loads: vLLM then asks which blocks failed.

Invariants: no part of a page is outside the caches; copies run without the GIL; copies into a pool block begin behind
all that the engine had queued when the load was ordered; a pool block is read only once the step that filled it has
ended. The saver waits for that before it copies, since it must be able to give the copy up at that time. While the
engine decodes, blocks are copied out at the rate of the budget.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore_client.device import (
    DeviceMemory,
    DeviceMoment,
    DevicePool,
    LayerLoad,
    LinkBudget,
    PoolPart,
    TwoWayTransfers,
)
from kvstore_client.lease import Lease
from kvstore_client.memory import Bytes
from kvstore_client.session import Session
from kvstore_connectors.vllm.groups import StateGroup, StateGroups
from kvstore_connectors.vllm.host_pages import PagedLayers
from kvstore_connectors.vllm.model import refused_backends
from kvstore_connectors.vllm.orders import Place
from kvstore_connectors.vllm.pages import Pages

if TYPE_CHECKING:
    import torch

_AXES = 4  # block, head, token, content


@dataclass(frozen=True, slots=True)
class KVTensors:
    """The result of examining vLLM's KV caches. `device` is the number of the CUDA device, as this process counts, with
    which the session must be opened, or None for host memory. `pages(session)` returns the pool that blocks are copied
    to and from.
    """

    device: int | None
    pages: Callable[[Session], Pages]


def current_stream(device: int) -> int:
    """Return the address of the CUstream on which this thread's work on the CUDA device number `device` runs."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def kv_tensors(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    groups: StateGroups | None = None,
    stream_of: Callable[[int], int] = current_stream,
    budget: LinkBudget | None = None,
) -> KVTensors:
    """Examine vLLM's KV caches, tensors by layer name, and return how to copy blocks to and from them. `groups` is None
    if vLLM has one group of layers. `stream_of(device)` returns a CUstream's address, and `budget` limits copies on
    a device. Raises ValueError with a sentence for caches that cannot be copied.
    """
    group, blocks = kv_cache_config.kv_cache_groups[0], kv_cache_config.num_blocks
    if groups is not None and not groups.is_plain:
        first, *others = [_host_pool(kv_caches, each, blocks) for each in groups.groups]
        first.others = others
        return KVTensors(None, lambda session: first)
    tensors = _of_layers("KV cache", kv_caches, group.layer_names)
    page_bytes = group.kv_cache_spec.page_size_bytes
    if not tensors[0].is_cuda:
        layers = PagedLayers([_byte_view(tensor, blocks, page_bytes) for tensor in tensors])
        _check_apart(tensors)
        return KVTensors(None, lambda session: layers)
    attention = _of_layers("attention", vllm_config.compilation_config.static_forward_context, group.layer_names)
    refused = refused_backends({layer.get_attn_backend().get_name() for layer in attention})
    if refused:
        raise ValueError(refused)
    pool = device_pool([CacheMemory.of(tensor) for tensor in tensors], blocks=blocks, page_bytes=page_bytes)
    index = int(tensors[0].device.index)
    stream = partial(stream_of, index)
    return KVTensors(index, lambda session: VllmDevicePages(session.device, pool, stream, budget))


def _host_pool(kv_caches: Mapping[str, torch.Tensor], group: StateGroup, blocks: int) -> PagedLayers:
    """Return the pool of one of several groups: the pieces of each layer follow each other, layer by layer."""
    layers, slots = list[Bytes](), list[int]()
    for number, names in enumerate(group.layers):
        tensors = _of_layers("KV cache", kv_caches, names)
        _check_apart(tensors)
        for tensor in tensors:
            if tensor.is_cuda:
                raise ValueError("several kinds of KV cache are copied in host memory only")
            view = _byte_view(tensor, blocks, group.page_bytes)
            layers += [view] * group.pieces
            slots += range(number * group.pieces, (number + 1) * group.pieces)
    return PagedLayers(layers, slots)


def _check_apart(tensors: Sequence[torch.Tensor]) -> None:
    if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
        raise ValueError("layers share KV memory, which is not supported")


def _of_layers(what: str, by_name: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(f"vLLM shows no {what} of layer {missing[0]}")
    return [by_name[name] for name in names]


def _byte_view(tensor: torch.Tensor, blocks: int, page_bytes: int) -> Any:
    """Return uint8[blocks, page_bytes], sharing vLLM's memory, without the padding behind each state."""
    import torch

    is_padded = tensor.shape[0] == blocks and tensor[0].is_contiguous()
    if tensor.nbytes != blocks * page_bytes or not (tensor.is_contiguous() or is_padded):
        raise ValueError(
            f"a block of a layer's KV cache is not one run of {page_bytes} bytes, a layout that this vLLM is not known "
            "to use on CPUs"
        )
    return tensor.view(blocks, -1).view(torch.uint8).numpy()


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """The place of one layer's KV cache in memory: the `shape` of its axes, their `strides` in bytes, and `item_bytes`
    for one element.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int

    @classmethod
    def of(cls, tensor: Any) -> CacheMemory:
        """Return the place of the torch tensor `tensor`, on any device."""
        item_bytes = int(tensor.element_size())
        strides = tuple(int(stride) * item_bytes for stride in tensor.stride())
        return cls(int(tensor.data_ptr()), tuple(map(int, tensor.shape)), strides, item_bytes)


def device_pool(caches: Sequence[CacheMemory], *, blocks: int, page_bytes: int) -> DevicePool:
    """Return the pool of `blocks` pages on a device, with `page_bytes` bytes in each of the layers `caches`. Raises
    ValueError with a sentence that says what is not supported.
    """
    if len({cache.address for cache in caches}) != len(caches):
        raise ValueError("layers share KV memory, which is not supported")
    return DevicePool([_parts(cache, blocks, page_bytes) for cache in caches], blocks)


def _parts(cache: CacheMemory, blocks: int, page_bytes: int) -> list[PoolPart]:
    """Return the parts of a page of one layer, in the order of their addresses."""
    if len(cache.shape) != _AXES or not blocks or cache.shape[0] % blocks or 0 in cache.shape:
        raise ValueError(
            f"a layer's KV cache has the shape {cache.shape}, and [{blocks} blocks, head, token, content] is expected"
        )
    ratio = cache.shape[0] // blocks  # kernels may see each block as several smaller ones, one behind the other
    block_stride = cache.strides[0] * ratio
    axes = [(cache.strides[0], ratio), *zip(cache.strides[1:], cache.shape[1:], strict=True)]
    nbytes = cache.item_bytes * math.prod(size for _, size in axes)
    if nbytes != page_bytes:
        raise ValueError(f"a block of a layer has {nbytes} bytes of {page_bytes}: padded pages are not supported")
    (head_stride, heads), (token_stride, tokens) = axes[1], axes[2]
    if ratio > 1 and heads > 1 and tokens > 1 and head_stride > token_stride:
        raise ValueError(
            f"its kernels see a block as {ratio} smaller ones, each ordered by heads: divide --block-size by {ratio}, "
            "or set VLLM_KV_CACHE_LAYOUT=LBNHC"
        )
    _check_no_overlap(cache, [(block_stride, blocks), *axes])
    outer = sorted(((stride, size) for stride, size in axes if size > 1), reverse=True)
    run = cache.item_bytes
    while outer and outer[-1][0] == run:
        run *= outer.pop()[1]
    places = itertools.product(*(range(0, stride * size, stride) for stride, size in outer))
    return [PoolPart(cache.address + sum(place), block_stride, run) for place in places]


def _check_no_overlap(cache: CacheMemory, axes: Sequence[tuple[int, int]]) -> None:
    extent = cache.item_bytes
    for stride, size in sorted(axes):
        if size > 1:
            if stride < extent:
                raise ValueError(f"a layer's KV cache overlaps itself: shape {cache.shape}, strides {cache.strides}")
            extent += stride * (size - 1)


class VllmDevicePages:
    """The KV pool of an engine on a CUDA device. `device` is the session's device. `stream()` returns the address of
    the CUstream on which the calling thread computes. `budget` limits the rate of copies, and is closed with the pool.
    It implements `Pages`. Raises DeviceError.
    """

    is_on_device = True

    def __init__(
        self, device: DeviceMemory, pool: DevicePool, stream: Callable[[], int], budget: LinkBudget | None = None
    ) -> None:
        self._device, self._stream = device, stream
        self.block_bytes = pool.block_bytes
        self._transfers = TwoWayTransfers(device, pool, budget)
        self.loads, self.stores = self._transfers.loads, self._transfers.stores

    def now(self) -> DeviceMoment:
        return DeviceMoment(self._device, self._stream())

    def of(self, group: int) -> VllmDevicePages:
        assert not group, "a device has pools of one group"
        return self

    def load(self, sources: Sequence[tuple[Lease, Sequence[Place]]], after: DeviceMoment) -> DeviceLoad:
        leases = [(lease, 0, [_one(place) for place in places]) for lease, places in sources]
        return DeviceLoad(self.loads.load_all(leases, after=after.event, keep=after), self._stream)

    def gather(self, block_id: Place, destination: Bytes) -> None:
        finish = self.stores.payload_of(_one(block_id))(destination)
        if finish is not None:
            finish()

    def decoding(self, is_decoding: bool) -> None:
        self._transfers.budget.decoding(is_decoding)

    def hurried(self) -> contextlib.AbstractContextManager[None]:
        return self._transfers.budget.lifted("stores")

    def close(self) -> None:
        self._transfers.close()


def _one(place: Place) -> int:
    assert isinstance(place, int), "a device has pools of one group"
    return place


class DeviceLoad:
    """A load of blocks into a pool on a CUDA device. `stream()` returns the address of the CUstream that must wait for
    the load. It implements `PageLoad`.
    """

    def __init__(self, load: LayerLoad, stream: Callable[[], int]) -> None:
        self._load, self._stream = load, stream

    def wait(self, layer: int) -> None:
        self._load.wait_quietly(layer, self._stream())

    def finish(self) -> None:
        self._load.finish()
