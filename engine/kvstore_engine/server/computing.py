"""Opens the executor of a server, and its pool: ggml in a worker process, or torch in the scheduler's own.

The module owns their lifetime and the size of the pool, and steps in the scheduler's own process: a device's memory
belongs to the process that got it, and the scheduler copies K and V in and out of it. A step that fails there costs the
answers in it and no other. If a step hangs, or a device has failed for good, the process ends and is started again:
only that ends a kernel that never ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvstore_client.link_rate import parse_rate
from kvstore_engine.batching.compute import Compute
from kvstore_engine.devices import DeviceName
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.executors import PoolSetup, StepExecutor, StepSizes
from kvstore_engine.executors.logits import StepLogits
from kvstore_engine.gguf import FileWatch
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.host_memory import available_bytes
from kvstore_engine.kernels.page_bounds import PageBounds
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.model.placement import copied_bytes
from kvstore_engine.opening import open_copies, open_executor
from kvstore_engine.page_selection import PageSelection
from kvstore_engine.pool import (
    ENGINE_BLOCK_TOKENS,
    kv_row_bytes,
    selecting_layers,
    selecting_pool,
    window_pool_blocks,
)
from kvstore_engine.restore.copies import HostPoolCopies, PoolCopies
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.worker import EngineWorkerNotice, RemoteExecutor, StepFailed
from kvstore_engine.worker.memory import SharedMemory
from kvstore_engine.worker.patience import StepPatience

_HUNG = 75  # EX_TEMPFAIL: another process may do better
_WARM_UP_TOKENS = 64
STEP_TOKENS = 512  # of prompts
_MOST_OF_MEMORY = 0.5  # of what is free, for a pool without --pool
_log = logging.getLogger(__name__)


def _end() -> None:
    os._exit(_HUNG)


class HangWatch:
    """A thread that calls `end`, which ends this process, when a step of the model takes longer than `patience`
    allows.
    """

    def __init__(self, patience: StepPatience, end: Callable[[], None] = _end) -> None:
        self._patience, self._end = patience, end
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, slices: Sequence[SequenceSlice]) -> Iterator[None]:
        """Watch the step of `slices`, which the `with` block computes, and learn its time for later limits."""
        limit_s, begin_s = self._patience.limit_s(slices), time.monotonic()
        with self._changed:
            self._due_s = begin_s + limit_s
            self._changed.notify()
        try:
            yield
        finally:
            self._due_s = None  # the thread sees it when that time has come
        self._patience.took(slices, time.monotonic() - begin_s)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                due_s = self._due_s
                if due_s is None:
                    self._changed.wait()
                elif (left_s := due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    _log.error("a step hangs: this process ends, and is started again")
                    self._due_s = None
                    self._end()


class InProcess:
    """A `Compute` that runs steps of `executor` in this process. The caller closes `executor` and `watch`."""

    def __init__(self, executor: StepExecutor, watch: HangWatch) -> None:
        self._executor, self._watch = executor, watch
        self.limits, self.pool = executor.limits, executor.pool

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None, /) -> StepLogits:
        """Compute `slices` as `StepExecutor.step` does. Raises StepFailed if this step failed, OperationError if no
        later one can succeed either.
        """
        try:
            with self._watch.watching(slices):
                return self._executor.step(slices, whole)
        except OperationError:
            raise
        except RuntimeError as error:
            raise StepFailed(f"the step failed: {error}", tuple(range(len(slices)))) from error

    def warm_up(self) -> None:
        """Compute a short prompt and one more token before the server answers, so that kernels are compiled and
        failures show. Raises OperationError.
        """
        pool = self.pool
        count = min(_WARM_UP_TOKENS, self.limits.max_tokens, self.limits.max_context - 1)
        blocks = pool.allocate(-(-(count + 1) // pool.block_tokens))
        try:
            for start, tokens in ((0, count), (count, 1)):
                self.step([SequenceSlice(np.zeros(tokens, np.int32), start, np.array(blocks, np.int32))])
        except StepFailed as error:
            raise OperationError(f"nothing can be computed here: {error}") from error
        finally:
            pool.free(blocks)


@dataclass(frozen=True, slots=True)
class Computing:
    """The objects with which a server computes steps. `compute` computes them. `worker` is the worker process that does
    so, or None if this process does. `open_copies` opens the copies between its pool and the daemon.
    """

    compute: Compute
    open_copies: Callable[[], contextlib.AbstractContextManager[PoolCopies]]
    worker: RemoteExecutor | None = None


@contextlib.contextmanager
def open_computing(
    watch: FileWatch,
    config: ModelConfig,
    options: EngineOptions,
    sizes: StepSizes,
    on_notice: Callable[[EngineWorkerNotice], None],
) -> Iterator[Computing]:
    """Open what computes steps on the device that `options` names, for the time of a `with` block. Raises UsageError or
    OperationError with a message of one line, and FileChanged if the weights may differ from the file that `watch`
    watches.
    """
    device = DeviceName.parse(options.device)
    if device.is_torch:
        with _on_device(watch, config, options, device, sizes) as computing:
            yield computing
        return
    with contextlib.ExitStack() as stack:
        memory = SharedMemory("kvengine-pool", touched=True)
        stack.callback(memory.close)
        free = max(0, available_bytes() - copied_bytes(watch.file))
        blocks, windows = pool_blocks(config, options, sizes.max_context, free, divided=True)
        pool = selecting_pool(
            config,
            blocks,
            _selection(options),
            kv_dtype=options.kv_dtype,
            memory=memory.allocate,
            window_blocks=windows,
        )
        patience = StepPatience(options.hung_after_s)
        worker = RemoteExecutor(watch, config, pool, memory, sizes, patience=patience, on_notice=on_notice)
        stack.callback(worker.close)
        yield Computing(worker, lambda: contextlib.nullcontext(HostPoolCopies(pool)), worker)


@contextlib.contextmanager
def _on_device(
    watch: FileWatch, config: ModelConfig, options: EngineOptions, device: DeviceName, sizes: StepSizes
) -> Iterator[Computing]:
    from kvstore_engine.torch_executor import room_for_pool

    blocks, _ = pool_blocks(config, options, sizes.max_context, room_for_pool(watch.file, config, device))
    setup = PoolSetup(blocks, ENGINE_BLOCK_TOKENS, options.kv_dtype, selection=_selection(options))
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
        yield Computing(computing, partial(open_copies, executor, device, parse_rate(options.store_rate)))


def _selection(options: EngineOptions) -> PageSelection | None:
    return PageSelection.parse(options.select_pages) if options.select_pages is not None else None


def pool_blocks(
    config: ModelConfig, options: EngineOptions, context: int, available_bytes: int, *, divided: bool = False
) -> tuple[int, int]:
    """Return the number of K/V blocks of the pool, and the number for layers with a sliding window (0 unless
    `divided`). `available_bytes` is the memory that the weights leave free. Raises UsageError if one answer of
    `context` tokens does not fit the pool, or the pool does not fit the memory.
    """
    try:
        row_bytes = kv_row_bytes(config, options.kv_dtype)
    except ValueError as error:
        raise UsageError(str(error)) from None
    layer_bytes, windowed = 2 * ENGINE_BLOCK_TOKENS * row_bytes, len(config.windowed_layers) if divided else 0

    # With --select-pages every block has bounds beside it.
    added_bytes = 0
    if options.select_pages is not None:
        added_bytes = PageBounds.block_bytes(selecting_layers(config), config.kv_heads, config.head_dim)

    def windows(blocks: int) -> int:
        step = min(STEP_TOKENS, context)
        sequences = options.max_sequences if windowed else 0
        return windowed and window_pool_blocks(
            config, blocks, block_tokens=ENGINE_BLOCK_TOKENS, sequences=sequences, step_tokens=step
        )

    def size_bytes(blocks: int) -> int:
        return layer_bytes * (blocks * (config.layers - windowed) + windows(blocks) * windowed) + blocks * added_bytes

    # What one sequence of the whole context needs, in whole storage blocks.
    least = -(-context // STORAGE_BLOCK_TOKENS) * STORAGE_BLOCK_TOKENS // ENGINE_BLOCK_TOKENS
    most_bytes = options.pool_bytes
    if most_bytes is None:
        most_bytes = min(size_bytes(least * options.max_sequences), int(available_bytes * _MOST_OF_MEMORY))
    most = most_bytes // (layer_bytes * (config.layers - windowed))
    blocks = bisect_right(range(most + 1), most_bytes, key=size_bytes) - 1
    if size_bytes(blocks) > available_bytes:
        raise UsageError(
            f"a pool of {size_bytes(blocks) >> 20} MiB does not fit into the {available_bytes >> 20} MiB of memory "
            "that are free beside the weights: give a smaller --pool"
        )
    if blocks < least:
        raise UsageError(
            f"a pool of {most_bytes} bytes holds {max(0, blocks) * ENGINE_BLOCK_TOKENS} tokens, "
            f"fewer than the context of {context}: give --pool {size_bytes(least)} or more, or a smaller --context"
        )
    return blocks, windows(blocks)
