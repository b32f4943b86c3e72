"""Decode throughput of 1, 4, 8 and 16 sequences, without HTTP, against llama.cpp on the same ggml build.

A step gives each sequence one token, the choice of the likeliest included; prompts of 192 to 256 tokens, two threads,
K and V in f16. The baseline is the faster of llama.cpp's settings without the unified cache, flash attention off and on
(`-fa off -no-kvu` is its best known one on CPUs); its default, both on, is reported beside it. Each side runs in a
process of its own, in turns; a figure is the median of its turns. On both sides threads spin at barriers as libgomp
does by default. `core_wait` is the share of the time that threads were ready but had no core: over some 0.05 the
machine was not quiet and the ratios say little.

`decode_16_of_bound` compares with what the memory allows: a step reads all weights and the K and V of every sequence
once. Its side has every instruction of this processor, and the bound is the bytes of a step over the speed at which
the same number of threads reads as many bytes in the same run. `decode_16_of_products` compares with a step that only
multiplies: all matrices with 16 rows, by our kernels, in turns with whole steps; it bounds the row before, too.

    python benchmarks/engine_decode.py [--json] [--quick]
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from support.engine import THREADS, comparable, model_path, quantisations
from support.report import AT_LEAST, Row, main, progress

from kvstore_engine.bench.against import DEFAULT, OURS, PRODUCTS, decode_speeds, decoders
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import kv_row_bytes

TARGETS = {1: 1.1, 4: 1.3, 8: 1.4, 16: 1.6}
PROMPT_TOKENS = 256
OF_BOUND = 0.7


def measure(quick: bool) -> list[Row]:
    rows = []
    for quantisation in quantisations(quick):
        with decoders(model_path(quantisation), THREADS, comparable()) as sides:
            for count, target in TARGETS.items():
                speeds = decode_speeds(
                    sides, count, prompt_tokens=PROMPT_TOKENS, steps=24 if quick else 48, rounds=1 if quick else 3
                )
                ours, name = speeds.per_s[OURS], f"{quantisation}_decode_{count}"
                rows.append(Row(name, ours, "tokens/s", speeds.best, "llama.cpp, best", AT_LEAST, target))
                rows.append(Row(f"{name}_default", ours, "tokens/s", speeds.per_s[DEFAULT], "llama.cpp, default"))
                waits = ", ".join(f"{side} {share:.2f}" for side, share in speeds.core_wait.items())
                progress(f"{name}: ours {ours:.0f}, best {speeds.best:.0f} tokens/s; core_wait {waits}")
        rows += _of_bounds(quantisation, steps=24 if quick else 48, rounds=1 if quick else 3)
    return rows


def _of_bounds(quantisation: str, steps: int, rounds: int) -> list[Row]:
    """Return the rows of the largest batch against the speed of the memory, and against its products alone."""
    model, count = model_path(quantisation), max(TARGETS)
    step_bytes = bytes_of_step(model, count, PROMPT_TOKENS + steps // 2)
    before = read_bytes_per_s(step_bytes, THREADS)
    with decoders(model, THREADS, {}) as sides:
        both = {OURS: sides[OURS], PRODUCTS: sides[OURS]}
        speeds = decode_speeds(both, count, prompt_tokens=PROMPT_TOKENS, steps=steps, rounds=rounds).per_s
    per_s = max(before, read_bytes_per_s(step_bytes, THREADS))
    progress(f"{quantisation}: {step_bytes / 1e6:.0f} MB a step, read at {per_s / 1e9:.1f} GB/s")
    name, bound = f"{quantisation}_decode_{count}", count * per_s / step_bytes
    ours, products, alone = speeds[OURS], speeds[PRODUCTS], "a step's products alone"
    read = "weights, K and V read once a step"
    return [
        Row(f"{name}_of_bound", ours, "tokens/s", bound, read, AT_LEAST, OF_BOUND, products, alone),
        Row(f"{name}_of_products", ours, "tokens/s", products, alone),
    ]


def bytes_of_step(model: Path, sequences: int, context: int) -> int:
    """Return the bytes that one decode step of `sequences` sequences of `context` tokens has to read: every matrix once
    (of a separate table of embeddings only some rows), and the K and V of all tokens, in f16.
    """
    with GGUFFile.open(model) as file:
        config = ModelConfig.from_gguf(file)
        weights = sum(tensor.nbytes for tensor in file.tensors.values())
        if "output.weight" in file.tensors:
            weights -= file.tensors["token_embd.weight"].nbytes
    return weights + sequences * context * config.layers * 2 * kv_row_bytes(config, "f16")


def read_bytes_per_s(nbytes: int, threads: int) -> float:
    """Return the bytes a second at which `threads` threads read `nbytes` bytes of memory, the best of a few times."""
    parts = np.array_split(np.ones(nbytes // 8, np.uint64), threads)
    best_s = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(9):
            begin = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))
            best_s = min(best_s, time.perf_counter() - begin)
    return nbytes / best_s


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
