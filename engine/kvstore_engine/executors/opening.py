"""Opens the executor of a device: model, pool and executor, with their lifetime.

Owns which implementation a device's name stands for. Both are imported when they are first needed.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator

from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.devices import DeviceName
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile


@contextlib.contextmanager
def open_executor(
    file: GGUFFile,
    device: DeviceName,
    pool: PoolSetup,
    sizes: StepSizes,
    memory: Callable[[int], mmap.mmap] | None = None,
) -> Iterator[StepExecutor]:
    """The executor of `file` on `device`, until the block ends; takes over `file`. `memory`: of a pool on `cpu`.

    UnsupportedModel, UsageError and OperationError say in one line what cannot be run there, or what is missing.
    """
    device.check_kv_dtype(pool.kv_dtype)
    if device.is_torch:
        from kvstore_engine.torch_executor import open_torch_executor

        with open_torch_executor(file, device, pool, sizes) as executor:
            yield executor
        return
    from kvstore_engine.executor import Executor
    from kvstore_engine.model import load_model
    from kvstore_engine.pool import BlockPool

    with contextlib.ExitStack() as stack:
        # How long sequences may become is part of a model's configuration: LongRoPE depends on it.
        model = stack.enter_context(load_model(file, context=sizes.max_context))
        blocks = BlockPool(
            model.config, pool.blocks, block_tokens=pool.block_tokens, kv_dtype=pool.kv_dtype, memory=memory
        )
        yield stack.enter_context(
            Executor(
                model,
                blocks,
                threads=sizes.threads,
                max_tokens_per_step=sizes.max_tokens_per_step,
                max_sequences=sizes.max_sequences,
                max_context=sizes.max_context,
            )
        )
