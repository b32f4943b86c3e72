"""An engine in this process, put together for a measurement.

Owns the lifetime of the model, the pool, the executor and the engine. The pool is as large as asked for, not as the
machine would allow: how much fits is part of what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from kvstore_engine.batching import BatchEngine, EngineSettings, Observer
from kvstore_engine.devices import CPU
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import DeviceName, PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.opening import open_executor
from kvstore_engine.restore.fingerprint import STORAGE_BLOCK_TOKENS
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BenchEngine:
    """How to run the engine. `pool_tokens` None: `sequences` of the whole context."""

    model: Path
    context: int
    sequences: int = 16
    threads: int | None = None
    block_tokens: int = 16
    kv_dtype: str = "f16"
    pool_tokens: int | None = None
    settings: EngineSettings = field(default_factory=EngineSettings)
    device: str = CPU


@contextlib.contextmanager
def opened(wanted: BenchEngine, observer: Observer | None = None) -> Iterator[BatchEngine]:
    """The engine until the block ends. UsageError and OperationError as loading a model raises them."""
    from kvstore_engine.model import ModelConfig

    with contextlib.ExitStack() as stack:
        file = stack.enter_context(GGUFFile.open(wanted.model))
        tokenizer = Tokenizer.from_metadata(file.metadata)
        most = ModelConfig.from_gguf(file).context_length
        if wanted.context > most:
            raise UsageError(
                f"this load needs a context of {wanted.context} tokens, the model was trained for "
                f"{most}: ask for shorter prompts or answers"
            )
        pool = PoolSetup(_blocks(wanted), wanted.block_tokens, wanted.kv_dtype)
        threads = wanted.threads or default_threads()
        sizes = StepSizes(threads, 512 + wanted.sequences, wanted.sequences, wanted.context)
        executor = stack.enter_context(open_executor(file, DeviceName.parse(wanted.device), pool, sizes))
        engine = BatchEngine(executor, tokenizer, settings=wanted.settings, observer=observer)
        stack.callback(engine.close)
        yield engine


def _blocks(wanted: BenchEngine) -> int:
    tokens = wanted.pool_tokens or wanted.sequences * wanted.context
    step = max(STORAGE_BLOCK_TOKENS, wanted.block_tokens)
    whole = -(-max(tokens, wanted.context) // step) * step
    return whole // wanted.block_tokens
