"""Decode speed without HTTP: the engine's, and llama.cpp's own, each in a process that answers questions by lines.

    python -m kvstore_engine.bench.decoding ours|llama MODEL THREADS

The module owns the definition of a decode step on each side: one token for each sequence, with the choice of the
likeliest one included. A question is {"sequences", "prompt_tokens", "steps", "seed"} and, for llama.cpp, {"flash",
"unified"}; the answer holds the seconds of each step in which all sequences took part, and of those the seconds that
threads had to wait for a core. With {"products": True} this engine computes only a step's products with matrices.
"""

from __future__ import annotations

import contextlib
import ctypes as ct
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_engine.bench.child import answer_questions
from kvstore_engine.bench.workload import Int32Array

_TASKS = Path("/proc/self/task")
_ROUND_TOKENS = 256  # llama.cpp pads its K/V to so many
_WARM_STEPS = 2
_FIRST_WORD = 300


def core_wait_s() -> float:
    """Return the total of seconds that the threads of this process have waited for a free core; 0 if the kernel does
    not say.
    """
    waited_ns = 0
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that has just ended
                waited_ns += int((task / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


def prompts(question: dict[str, Any], vocabulary: int) -> list[Int32Array]:
    """Return random prompts of token ids below `vocabulary`, one for each sequence that `question` asks to decode.
    Equal questions give equal prompts, so that both sides of a comparison get the same ones.
    """
    random = np.random.Generator(np.random.PCG64(question["seed"]))
    most = question["prompt_tokens"]
    lengths = random.integers(max(1, most - most // 4), most + 1, question["sequences"])
    first = min(_FIRST_WORD, vocabulary // 2)
    return [random.integers(first, vocabulary, length).astype(np.int32) for length in lengths.tolist()]


def context_tokens(question: dict[str, Any]) -> int:
    """Return the context in tokens that one of the sequences needs that `question` asks to decode."""
    needed = question["prompt_tokens"] + question["steps"] + _WARM_STEPS + 1
    return int(-(-needed // _ROUND_TOKENS) * _ROUND_TOKENS)


def decode_llama(model: Path, threads: int, question: dict[str, Any]) -> dict[str, object]:
    from kvstore_engine.bench.llama_context import LlamaContext, LlamaContextSettings

    count = question["sequences"]
    settings = LlamaContextSettings(
        context_tokens(question) * count, count, threads, flash=question["flash"], unified=question["unified"]
    )
    with closing(LlamaContext(model, settings)) as context:
        asked = prompts(question, context.vocabulary)
        tokens = [context.prefill(number, prompt) for number, prompt in enumerate(asked)]
        positions = [len(prompt) for prompt in asked]
        seconds, waited = [], 0.0
        for step in range(_WARM_STEPS + question["steps"]):
            if step == _WARM_STEPS:
                waited = core_wait_s()
            begin = time.perf_counter()
            tokens = context.step(tokens, positions)
            seconds.append(time.perf_counter() - begin)
            positions = [position + 1 for position in positions]
        return {"seconds": seconds[_WARM_STEPS:], "core_wait_s": core_wait_s() - waited}


def decode_ours(model: Path, threads: int, question: dict[str, Any]) -> dict[str, object]:
    from kvstore_engine.batching.request import Request, RequestSettings
    from kvstore_engine.batching.settings import EngineSettings
    from kvstore_engine.bench.in_process import BenchEngine, opened

    count, steps = question["sequences"], question["steps"]
    settings = EngineSettings(max_running=count, prefix_sharing=False)
    wanted = BenchEngine(
        model,
        context=context_tokens(question) + _ROUND_TOKENS,  # the first go on while the last prompts are computed
        sequences=count,
        threads=threads,
        block_tokens=question.get("block_tokens", 16),
        kv_dtype=question.get("kv_dtype", "f16"),
        settings=settings,
    )
    with opened(wanted) as engine:
        asked = prompts(question, engine.compute.limits.vocabulary)
        most = wanted.context - max(map(len, asked)) - 1
        for number, prompt in enumerate(asked):
            engine.add(Request(str(number), prompt, RequestSettings(max_tokens=most, ignore_end=True)))
            # One prompt after another, as on the other side; who is done goes on decoding, which is not measured.
            while not any(event.request_id == str(number) for event in engine.step()):
                pass
        for _ in range(_WARM_STEPS):
            engine.step()
        seconds, waited = [], core_wait_s()
        for _ in range(steps):
            begin = time.perf_counter()
            events = engine.step()
            seconds.append(time.perf_counter() - begin)
            if len(events) != count:
                raise RuntimeError(f"a step brought {len(events)} tokens of {count} sequences")
        return {"seconds": seconds, "core_wait_s": core_wait_s() - waited}


def multiply_ours(model: Path, threads: int, question: dict[str, Any]) -> dict[str, object]:
    """Multiply, a step at a time, each of the model's matrices with a row for each sequence, as a decode step does.
    With {"head": False} in `question` the output's matrix is left out, as for the tokens of a prompt.
    """
    from kvstore_engine.ggml.structs import tensor_at
    from kvstore_engine.gguf import GGUFFile
    from kvstore_engine.graph.decoder import AttentionOperation, GraphBuilder, PoolTensors
    from kvstore_engine.graph.products import ProductOperations
    from kvstore_engine.kernels import select_kernels
    from kvstore_engine.kernels.foreign import array_at
    from kvstore_engine.kernels.layout import Product
    from kvstore_engine.model.weights import load_model
    from kvstore_proto.ggml_types import F32

    count, kernels, memory = question["sequences"], select_kernels(), Product.new()
    operations = ProductOperations(kernels.q4_product_address, kernels.q8_product_address, ct.addressof(memory))
    with contextlib.ExitStack() as stack:
        weights = stack.enter_context(load_model(GGUFFile.open(model)))
        ggml, layers = weights.library, range(weights.config.layers)
        parts = weights, PoolTensors((), ()), AttentionOperation(0, ()), operations
        builder = GraphBuilder(*parts, layers=layers, tokens=count, outputs=count)
        stack.callback(ggml.free, builder.context)
        rows: dict[int, int] = {}
        for linear in weights.linears()[: None if question.get("head", True) else -1]:
            width = tensor_at(linear.weight).ne[0]
            if width not in rows:
                rows[width] = ggml.new_tensor_2d(builder.context, F32, width, count)
                ggml.set_input(rows[width])
                ggml.set_output(rows[width])  # so that no product is written over it
            ggml.build_forward_expand(builder.graph, builder.linear(linear, rows[width]))
        backend, allocator = ggml.backend_cpu_init(), ggml.gallocr_new(ggml.backend_cpu_buffer_type())
        stack.callback(ggml.backend_free, backend)
        stack.callback(ggml.gallocr_free, allocator)
        ggml.backend_cpu_set_n_threads(backend, threads)
        if not ggml.gallocr_alloc_graph(allocator, builder.graph):
            raise MemoryError("no memory for the products of a step")
        random = np.random.Generator(np.random.PCG64(question["seed"]))
        for width, tensor in rows.items():
            array_at(tensor_at(tensor).data, np.float32, count, width)[:] = random.standard_normal((count, width))
        seconds, waited = [], 0.0
        for step in range(_WARM_STEPS + question["steps"]):
            if step == _WARM_STEPS:
                waited = core_wait_s()
            begin = time.perf_counter()
            ggml.backend_graph_compute(backend, builder.graph)
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds[_WARM_STEPS:], "core_wait_s": core_wait_s() - waited}


def main(arguments: list[str]) -> None:
    side, model, threads = arguments[0], Path(arguments[1]), int(arguments[2])

    def decode(model: Path, threads: int, question: dict[str, Any]) -> dict[str, object]:
        if side == "llama":
            return decode_llama(model, threads, question)
        return (multiply_ours if question.get("products") else decode_ours)(model, threads, question)

    answer_questions(lambda question: decode(model, threads, question))


if __name__ == "__main__":
    main(sys.argv[1:])
