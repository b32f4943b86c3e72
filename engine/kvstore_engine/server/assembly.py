"""Puts the scheduler's process together: pool, ggml worker, daemon sessions and the batch engine.

Owns the lifetime of all of them and the defaults that tie them together. It never runs a step.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvstore_client.restore.learned import LearnedCosts
from kvstore_engine.batching import BatchEngine, EngineSettings, Observer
from kvstore_engine.constrain import Constrainer, GrammarError
from kvstore_engine.errors import UsageError
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import check_vocabulary, context_tokens, fingerprint_of
from kvstore_engine.model import ModelConfig, copied_bytes
from kvstore_engine.models.cache import cache_root
from kvstore_engine.pool import ENGINE_BLOCK_TOKENS, BlockPool, kv_row_bytes
from kvstore_engine.profiler import TracingObserver
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.restore.profile import profile_path
from kvstore_engine.server.options import EngineOptions
from kvstore_engine.server.sessions import TenantSessions
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.worker import RemoteExecutor, StepSizes, WorkerNotice
from kvstore_engine.worker.memory import SharedMemory
from kvstore_engine.worker.patience import StepPatience

_STEP_TOKENS = 512
_MOST_OF_MEMORY = 0.5  # of what is free, for a pool without --pool


@dataclass(frozen=True, slots=True)
class Serving:
    """All that the loop drives and reports on. `sessions` is None without a daemon's folder."""

    engine: BatchEngine
    executor: RemoteExecutor
    pool: BlockPool
    constrainer: Constrainer
    tokenizer: Tokenizer
    sessions: TenantSessions | None


@contextlib.contextmanager
def open_serving(options: EngineOptions, on_notice: Callable[[WorkerNotice], None]) -> Iterator[Serving]:
    """Everything, until the block ends. UsageError and OperationError say in one line what is wrong."""
    threads = default_threads() if options.threads is None else options.threads
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(Path(options.model)))
        context = context_tokens(options.context, ModelConfig.from_gguf(file).context_length)
        tokenizer = Tokenizer.from_metadata(file.metadata)
        config = ModelConfig.from_gguf(file, context)  # LongRoPE depends on how long sequences may become
        check_vocabulary(tokenizer, config.vocabulary)
        memory = SharedMemory("kvengine-pool", touched=True)
        stack.callback(memory.close)
        pool = BlockPool(
            config,
            pool_blocks(config, options, context, max(0, _available_bytes() - copied_bytes(file))),
            kv_dtype=options.kv_dtype,
            memory=memory.allocate,
        )
        executor = stack.enter_context(
            RemoteExecutor(
                options.model,
                config,
                pool,
                memory,
                StepSizes(threads, _STEP_TOKENS + options.max_sequences, options.max_sequences, context),
                patience=StepPatience(options.hung_after_s),
                on_notice=on_notice,
            )
        )
        sessions, costs = None, LearnedCosts()
        if options.kvstore is not None:
            digest = file.weights_digest()
            fingerprint = fingerprint_of(file, config, tokenizer, pool, digest)
            sessions = TenantSessions(Path(options.kvstore), fingerprint)
            sessions.watch()
            stack.callback(sessions.close)
            if not options.has_tenants:
                sessions("")
            profile = profile_path(cache_root(), digest, threads)
            costs = LearnedCosts.load(profile)
            stack.callback(costs.save, profile)
        observer = Observer()
        if options.trace is not None:
            observer = tracing = TracingObserver(Path(options.trace))
            stack.callback(tracing.close)
        engine = BatchEngine(
            executor,
            pool,
            tokenizer,
            settings=_settings(options),
            sessions=sessions,
            costs=costs,
            observer=observer,
        )
        stack.callback(engine.close)
        constrainer = Constrainer(tokenizer, config.vocabulary)
        threading.Thread(target=_prepare, args=(constrainer,), daemon=True).start()
        yield Serving(engine, executor, pool, constrainer, tokenizer, sessions)


def _settings(options: EngineOptions) -> EngineSettings:
    settings = EngineSettings(
        policy=options.policy,  # type: ignore[arg-type]  # checked by the settings
        max_running=options.max_sequences,
        max_queued=options.max_queued,
    )
    return settings if options.swap_bytes is None else replace(settings, swap_bytes=options.swap_bytes)


def _prepare(constrainer: Constrainer) -> None:
    with contextlib.suppress(GrammarError):  # not installed: a request that needs it gets the error
        constrainer.prepare()


def pool_blocks(config: ModelConfig, options: EngineOptions, context: int, available_bytes: int) -> int:
    """Engine blocks of a pool of the size asked for, or of the default one; `available_bytes`: what copies of the
    weights leave free. UsageError if one answer does not fit the pool, or it not the memory: touching more than there
    is would end the process without a word.
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


def _available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be had without pushing other processes out."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    return next(int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:")
