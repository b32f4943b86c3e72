"""What the engine's own Python takes in a decode step of torch's executor: the time that a GPU waits for it.

A model of one narrow layer on the processor, of which a recorded step is replaced by nothing: what is left is planning,
checking, choosing, text and accounts. The figure is of the quickest tenth of the steps, with two sizes of vocabulary,
since logits that come to the host cost by theirs. Tokens are meaningless: a step's result never changes.

    python benchmarks/engine_step_python.py [--json] [--quick]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' models

import numpy as np
from support.report import Row, main

from kvstore_engine.batching import BatchEngine, EngineSettings, Request, RequestSettings
from kvstore_engine.devices import DeviceName
from kvstore_engine.executors import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.tokenizer import Tokenizer
from kvstore_engine.torch_executor.executor import TorchExecutor
from kvstore_engine.torch_executor.opening import new_pool
from kvstore_engine.torch_executor.recordings import Recorder, Replay
from kvstore_engine.torch_executor.reference_attention import ReferenceAttention
from kvstore_engine.torch_executor.weights import TorchModel
from tests.reference.make_gguf import TinyModel, write_model

BATCHES, VOCABULARIES, CONTEXT = (1, 16, 64), (320, 49152), 1024
AIM_MS = 0.3
PROMPT_TOKENS, WARM_STEPS = 64, 8


class StoppedRecorder(Recorder):
    """Computes a step once, and never again."""

    def record(self, compute: Callable[[], Any]) -> tuple[Replay, Any]:
        return lambda: None, compute()


@contextmanager
def opened(vocabulary: int) -> Iterator[tuple[TorchExecutor, Tokenizer]]:
    shape = TinyModel(
        layers=1, width=64, heads=1, kv_heads=1, feed_forward=64, vocabulary=vocabulary, quantisation="f32"
    )
    sizes = StepSizes(1, 1024, BATCHES[-1], CONTEXT)
    with tempfile.TemporaryDirectory() as folder:
        file = GGUFFile.open(write_model(Path(folder) / "narrow.gguf", shape))
        model = TorchModel(file, DeviceName.parse("torch:cpu"), CONTEXT)
        pool, cache = new_pool(model, PoolSetup(BATCHES[-1] * CONTEXT // 16, 16, "bf16"), sizes)
        attention = ReferenceAttention(cache)
        with (
            closing(model),
            TorchExecutor(model, pool, attention, sizes, StoppedRecorder(), cache.arrivals) as executor,
        ):
            yield executor, Tokenizer.from_metadata(file.metadata)


def step_ms(executor: TorchExecutor, tokenizer: Tokenizer, batch: int, steps: int) -> float:
    settings = EngineSettings(max_running=batch, prefix_sharing=False)
    with closing(BatchEngine(executor, tokenizer, settings=settings)) as engine:
        for number in range(batch):
            tokens = np.random.default_rng(number).integers(3, 300, PROMPT_TOKENS).astype(np.int32)
            engine.add(Request(str(number), tokens, RequestSettings(max_tokens=CONTEXT, ignore_end=True)))
        while len(engine.step()) < batch:
            pass
        for _ in range(WARM_STEPS):
            engine.step()
        took_s = []
        for _ in range(steps):
            began_s = time.perf_counter()
            engine.step()
            took_s.append(time.perf_counter() - began_s)
        return 1e3 * sorted(took_s)[steps // 10]


def measure(quick: bool) -> list[Row]:
    rows = []
    for vocabulary in VOCABULARIES:
        with opened(vocabulary) as (executor, tokenizer):
            for batch in BATCHES:
                took_ms = step_ms(executor, tokenizer, batch, 50 if quick else 200)
                rows.append(Row(f"step_python_{batch}_{vocabulary}", took_ms, "ms", AIM_MS, "the aim at 64"))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
