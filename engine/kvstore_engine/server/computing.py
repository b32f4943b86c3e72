"""What computes a server's steps, and its pool: ggml in a worker process, or torch in the scheduler's own.

Owns their lifetime and the size of the pool. It never runs a step but the first ones, which warm up.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from kvstore_client.link_rate import parse_rate
from kvstore_engine.batching.compute import Compute
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import PoolSetup, StepSizes
from kvstore_engine.gguf import FileWatch
from kvstore_engine.host_memory import available_bytes
from kvstore_engine.model import ModelConfig, copied_bytes
from kvstore_engine.opening import open_copies, open_executor
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, BlockPool, kv_row_bytes
from kvstore_engine.restore.copies import BlockCopies, HostCopies
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.server.hang_watch import HangWatch
from kvstore_engine.server.in_process import InProcess
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.worker import RemoteExecutor, WorkerNotice
from kvstore_engine.worker.memory import SharedMemory
from kvstore_engine.worker.patience import StepPatience

_MOST_OF_MEMORY = 0.5  # of what is free, for a pool without --pool
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Computing:
    """`worker`: the process that computes; None: this one does. `open_copies`: as of `opening`, for this pool."""

    compute: Compute
    pool: BlockPool
    open_copies: Callable[[], contextlib.AbstractContextManager[BlockCopies]]
    worker: RemoteExecutor | None = None


@contextlib.contextmanager
def open_computing(
    watch: FileWatch,
    config: ModelConfig,
    options: EngineOptions,
    sizes: StepSizes,
    on_notice: Callable[[WorkerNotice], None],
) -> Iterator[Computing]:
    """Compute on the device of `options`, until the block ends; the file of `watch` may be closed then. UsageError and
    OperationError say in one line what is wrong, and FileChanged that the weights may differ from the file."""
    device = DeviceName.parse(options.device)
    if device.is_torch:
        with _on_device(watch, config, options, device, sizes) as computing:
            yield computing
        return
    with contextlib.ExitStack() as stack:
        memory = SharedMemory("kvengine-pool", touched=True)
        stack.callback(memory.close)
        free = max(0, available_bytes() - copied_bytes(watch.file))
        blocks = pool_blocks(config, options, sizes.max_context, free)
        pool = BlockPool(config, blocks, kv_dtype=options.kv_dtype, memory=memory.allocate)
        patience = StepPatience(options.hung_after_s)
        worker = stack.enter_context(
            RemoteExecutor(watch, config, pool, memory, sizes, patience=patience, on_notice=on_notice)
        )
        yield Computing(worker, pool, lambda: contextlib.nullcontext(HostCopies(pool)), worker)


@contextlib.contextmanager
def _on_device(
    watch: FileWatch, config: ModelConfig, options: EngineOptions, device: DeviceName, sizes: StepSizes
) -> Iterator[Computing]:
    from kvstore_engine.torch_executor import room_for_pool

    blocks = pool_blocks(config, options, sizes.max_context, room_for_pool(watch.file, config, device))
    setup = PoolSetup(blocks, ENGINE_BLOCK_TOKENS, options.kv_dtype)
    with (
        open_executor(watch.file, device, setup, sizes) as executor,
        contextlib.closing(HangWatch(StepPatience(options.hung_after_s))) as hang_watch,
    ):
        watch.require_untouched()  # the weights were copied
        computing = InProcess(executor, hang_watch)
        computing.warm_up()
        _log.warning(
            "steps run on %s in the scheduler's process: if that ends, running answers end with it", device.name
        )
        yield Computing(
            computing, executor.pool, partial(open_copies, executor, device, parse_rate(options.store_rate))
        )


def pool_blocks(config: ModelConfig, options: EngineOptions, context: int, available_bytes: int) -> int:
    """Engine blocks of a pool of the size asked for, or of the default one; `available_bytes`: what the weights leave
    free. UsageError if one answer does not fit the pool, or it not the memory: touching more than there is would end
    the process without a word.
    """
    try:
        block_bytes = 2 * config.layers * ENGINE_BLOCK_TOKENS * kv_row_bytes(config, options.kv_dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None
    # What one sequence of the whole context needs, in whole storage blocks.
    least = -(-context // STORAGE_BLOCK_TOKENS) * STORAGE_BLOCK_TOKENS // ENGINE_BLOCK_TOKENS
    if options.pool_bytes is not None:
        blocks = options.pool_bytes // block_bytes
    else:
        blocks = min(least * options.max_sequences, int(available_bytes * _MOST_OF_MEMORY // block_bytes))
    if blocks * block_bytes > available_bytes:
        raise UsageError(
            f"a pool of {blocks * block_bytes >> 20} MiB does not fit into the {available_bytes >> 20} MiB of memory "
            "that are free beside the weights: give a smaller --pool"
        )
    if blocks < least:
        raise UsageError(
            f"a pool of {blocks * block_bytes} bytes holds {blocks * ENGINE_BLOCK_TOKENS} tokens, "
            f"fewer than the context of {context}: give --pool {least * block_bytes} or more, or a smaller --context"
        )
    return blocks
