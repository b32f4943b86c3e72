"""Opens the executor of a device: model, pool and executor, with their lifetime.

The module owns which implementation a device's name stands for. Both are imported on first use.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvstore_client.link_rate import AUTO, Rate
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile

if TYPE_CHECKING:
    from kvstore_engine.model.weights import Model
    from kvstore_engine.pool import BlockPool
    from kvstore_engine.restore.copies import PoolCopies
    from kvstore_engine.stages.pipeline import Pipeline


@contextlib.contextmanager
def open_executor(
    file: GGUFFile,
    device: DeviceName,
    pool: PoolSetup,
    sizes: StepSizes,
    memory: Callable[[int], mmap.mmap] | None = None,
) -> Iterator[StepExecutor]:
    """Load the model in `file` on `device` and open an executor for it, with a K/V pool by `pool` and step limits by
    `sizes`, for the time of a `with` block. `file` is closed at the end. `memory` allocates the memory of a pool on
    `cpu`. Raises UnsupportedModel, UsageError or OperationError with a message of one line.
    """
    device.check_kv_dtype(pool.kv_dtype)
    if device.is_torch:
        if pool.selection is not None:
            raise UsageError(f"--select-pages is for the device cpu, not for {device.name}: leave it out there")
        from kvstore_engine.torch_executor import open_torch_executor

        with open_torch_executor(file, device, pool, sizes) as executor:
            yield executor
        return
    from kvstore_engine.executor import Executor

    with (
        open_host_pool(file, pool, sizes, memory) as (model, blocks),
        Executor(model, blocks, sizes) as made,
    ):
        yield made


@contextlib.contextmanager
def open_copies(executor: StepExecutor | Pipeline, device: DeviceName, store_rate: Rate = AUTO) -> Iterator[PoolCopies]:
    """Open a maker of copies between the daemon and the pool of `executor` on `device`, for the time of a `with` block.
    `store_rate` limits copies out of a GPU's pool while it decodes.
    """
    if device.is_torch:
        from kvstore_engine.torch_executor import open_torch_copies
        from kvstore_engine.torch_executor.executor import TorchExecutor

        assert isinstance(executor, TorchExecutor)
        with open_torch_copies(executor, store_rate) as copies:
            yield copies
        return
    from kvstore_engine.restore.copies import HostPoolCopies

    yield HostPoolCopies(executor.pool)


@contextlib.contextmanager
def open_stages(file: GGUFFile, stages: int, pool: PoolSetup, sizes: StepSizes) -> Iterator[Pipeline]:
    """Open the model of `file` as a pipeline of `stages` stages on the processor, with `sizes.threads` threads each,
    for the time of a `with` block. Raises UsageError for more stages than layers."""
    from kvstore_engine.stages.pipeline import open_pipeline

    with open_host_pool(file, pool, sizes) as (model, blocks):
        if stages > model.config.layers:
            raise UsageError(f"{stages} stages are more than the {model.config.layers} layers of this model")
        with open_pipeline(model, blocks, stages, sizes) as pipeline:
            yield pipeline


@contextlib.contextmanager
def open_host_pool(
    file: GGUFFile, pool: PoolSetup, sizes: StepSizes, memory: Callable[[int], mmap.mmap] | None = None
) -> Iterator[tuple[Model, BlockPool]]:
    """Load the model of `file` for ggml, and make a K/V pool for it in host memory, for the time of a `with` block.
    `memory` allocates that memory.
    """
    from kvstore_engine.model.weights import load_model
    from kvstore_engine.pool import selecting_pool

    # How long sequences may become is part of a model's configuration: LongRoPE depends on it.
    with load_model(file, context=sizes.max_context) as model:
        made = selecting_pool(
            model.config,
            pool.blocks,
            pool.selection,
            block_tokens=pool.block_tokens,
            kv_dtype=pool.kv_dtype,
            memory=memory,
            window_blocks=pool.window_blocks,
        )
        yield model, made
