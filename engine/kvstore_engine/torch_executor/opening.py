"""Puts model, pool, attention and executor together for a torch device.

The module owns their lifetime, and the choice of attention: the engine's kernels on a GPU, plain torch on the
processor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

from kvstore_client.link_rate import AUTO, Rate
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.kernels.cuda.device import Device
from kvstore_engine.kernels.cuda.program import Launcher
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.metadata import UnsupportedModel
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, BlockPool
from kvstore_engine.restore.copies import HostPoolCopies, PoolCopies
from kvstore_engine.torch_executor.attention import (
    AttentionBackend,
    KernelAttention,
    ReferenceAttention,
    crossover_on,
    kernel_shape,
)
from kvstore_engine.torch_executor.cache import Cache
from kvstore_engine.torch_executor.device_copies import open_device_copies
from kvstore_engine.torch_executor.executor import TorchExecutor
from kvstore_engine.torch_executor.library import check_device, current_stream, free_bytes, torch_library
from kvstore_engine.torch_executor.model import TorchModel, weight_bytes
from kvstore_engine.torch_executor.planes import Memory, TorchPlanes
from kvstore_engine.torch_executor.prefix_window import PrefixWindow
from kvstore_engine.torch_executor.recordings import cuda_recorder


@contextlib.contextmanager
def open_torch_executor(
    file: GGUFFile, device: DeviceName, setup: PoolSetup, sizes: StepSizes
) -> Iterator[TorchExecutor]:
    """Load the model in `file` on the torch `device`, and give the `with` block an executor with a pool by `setup` and
    step limits by `sizes`. Raises the errors of `opening.open_executor`.
    """
    check_device(device)
    with contextlib.ExitStack() as stack:
        if device.is_cuda:
            stack.enter_context(torch_library().cuda.device(device.torch_name))
        model = TorchModel(file, device, sizes.max_context)
        stack.callback(model.close)
        attention: AttentionBackend
        if device.is_cuda:
            launcher = _launcher(device, stack)
            pool, cache = new_pool(model, setup, sizes, launcher)
            attention, recorder = _on_gpu(cache, launcher, device, stack), cuda_recorder()
            if pool.blocks > 1:
                pool.copy_blocks([0], [1])  # what moves blocks is compiled, and fails, before anything is served
        else:
            pool, cache = new_pool(model, setup, sizes)
            attention, recorder = ReferenceAttention(cache), None
        yield stack.enter_context(TorchExecutor(model, pool, attention, sizes, recorder, cache.arrivals))


@contextlib.contextmanager
def open_torch_copies(executor: TorchExecutor, store_rate: Rate = AUTO) -> Iterator[PoolCopies]:
    """Open a maker of copies between the daemon and the pool of `executor` for the time of a `with` block. On a GPU
    `store_rate` limits copies out of the pool while the engine decodes.
    """
    device, host = executor.model.device, HostPoolCopies(executor.pool)
    if not device.is_cuda:
        yield host
        return
    stream = partial(current_stream, device)
    with open_device_copies(device.index, executor.pool, executor.arrivals, stream, store_rate) as copies:
        yield copies or host


def refusals(file: GGUFFile, config: ModelConfig, device: DeviceName) -> list[str]:
    """Return the reasons why the model in `file` cannot run on `device`, one sentence each; an empty list if it can.
    Reasons that ggml's own checks find are not among them.
    """
    found = []
    try:
        check_device(device)
        if (needed := weight_bytes(file, config, device)) > (free := free_bytes(device)):
            found.append(f"the weights take {needed >> 20} MiB as bf16, and {device.name} has {free >> 20} MiB free")
    except (UsageError, OperationError) as error:
        found.append(str(error))
    if device.is_cuda:
        try:
            kernel_shape(config, ENGINE_BLOCK_TOKENS, "f16")
        except UnsupportedModel as error:
            found.append(str(error))
    return found


def room_for_pool(file: GGUFFile, config: ModelConfig, device: DeviceName) -> int:
    """Return how many bytes of the memory of `device` are free for the K/V pool once the weights of `file` are loaded.
    Raises UsageError if the machine has no such device.
    """
    check_device(device)
    return max(0, free_bytes(device) - weight_bytes(file, config, device))


def new_pool(
    model: TorchModel,
    setup: PoolSetup,
    sizes: StepSizes,
    launcher: Launcher | None = None,
    memory: Memory | None = None,
) -> tuple[BlockPool, Cache]:
    """Make a K/V pool on the device of `model`. Return the pool, and the same memory in the form that attention uses.
    `setup` and `sizes` give its size; `launcher` and `memory` are explained at `TorchPlanes`.
    """
    placed: list[TorchPlanes] = []

    def place(count: int, blocks: int, block_bytes: int) -> TorchPlanes:
        placed.append(TorchPlanes(count, blocks, block_bytes, device=model.device, launcher=launcher, memory=memory))
        return placed[0]

    pool = BlockPool(model.config, setup.blocks, block_tokens=setup.block_tokens, kv_dtype=setup.kv_dtype, place=place)
    return pool, Cache(model.config, pool, placed[0].tensor, sizes.max_context, model.rope_factors)


def _launcher(device: DeviceName, stack: contextlib.ExitStack) -> Device:
    launcher = Device(device.index)
    stack.callback(launcher.close)
    return launcher


def _on_gpu(cache: Cache, launcher: Device, device: DeviceName, stack: contextlib.ExitStack) -> KernelAttention:
    torch = torch_library()
    window = PrefixWindow.wanted(launcher, cache.planes.shape[2])
    if window is not None:
        stack.callback(launcher.set_aside_cache, 0)
        torch.cuda.synchronize(device.torch_name)  # the weights were copied on the default stream
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device.torch_name)))  # it can have no window
    return KernelAttention(cache, launcher, partial(current_stream, device), window, crossover_on(launcher, cache))
