"""vLLM's KV caches, as tensors, to the pool that the worker's half copies: in host memory, or on a CUDA device.

Owns the choice between the two, and refuses tensors whose bytes it cannot name. Imports torch where it needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore_client.device import LinkBudget
from kvstore_client.session import Session
from kvstore_connectors.vllm.device_layout import CacheMemory, device_pool
from kvstore_connectors.vllm.device_pages import DevicePages
from kvstore_connectors.vllm.layout import PagedLayers
from kvstore_connectors.vllm.model import refused_backends
from kvstore_connectors.vllm.pages import Pages

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVTensors:
    """`device`: the CUDA device, as this process counts, that the session is to be opened with; None: host memory."""

    device: int | None
    pages: Callable[[Session], Pages]


def current_stream(device: int) -> int:
    """The address of the CUstream that this thread's work on a device goes to."""
    import torch

    return int(torch.cuda.current_stream(device).cuda_stream)


def kv_tensors(
    kv_caches: Mapping[str, torch.Tensor],
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    stream_of: Callable[[int], int] = current_stream,
    budget: LinkBudget | None = None,
) -> KVTensors:
    """Of the layers of the only group, in its order. `budget`: of copies on a device. Raises ValueError with a
    sentence."""
    group, blocks = kv_cache_config.kv_cache_groups[0], kv_cache_config.num_blocks
    tensors = _of_layers("KV cache", kv_caches, group.layer_names)
    page_bytes = group.kv_cache_spec.page_size_bytes
    if not tensors[0].is_cuda:
        layers = PagedLayers([_byte_view(tensor, blocks, page_bytes) for tensor in tensors])
        if len({tensor.data_ptr() for tensor in tensors}) != len(tensors):
            raise ValueError("layers share KV memory, which is not supported")
        return KVTensors(None, lambda session: layers)
    attention = _of_layers("attention", vllm_config.compilation_config.static_forward_context, group.layer_names)
    refused = refused_backends({layer.get_attn_backend().get_name() for layer in attention})
    if refused:
        raise ValueError(refused)
    pool = device_pool([CacheMemory.of(tensor) for tensor in tensors], blocks=blocks, page_bytes=page_bytes)
    index = int(tensors[0].device.index)
    stream = partial(stream_of, index)
    return KVTensors(index, lambda session: DevicePages(session.device, pool, stream, budget))


def _of_layers(what: str, by_name: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    missing = [name for name in names if name not in by_name]
    if missing:
        raise ValueError(f"vLLM shows no {what} of layer {missing[0]}")
    return [by_name[name] for name in names]


def _byte_view(tensor: torch.Tensor, blocks: int, page_bytes: int) -> Any:
    """uint8[blocks, page_bytes], sharing vLLM's memory."""
    import torch

    expected = blocks * page_bytes
    if not tensor.is_contiguous() or tensor.nbytes != expected:
        raise ValueError(
            f"the KV cache of a layer is not one contiguous run of {expected} bytes, a layout that this vLLM is not "
            "known to use on CPUs"
        )
    return tensor.view(blocks, -1).view(torch.uint8).numpy()
