"""Decode throughput of 1, 4, 8 and 16 sequences, without HTTP, against llama.cpp on the same ggml build.

A step gives each sequence one token, the choice of the likeliest included; prompts of 192 to 256 tokens, two threads,
K and V in f16. The baseline is the faster of llama.cpp's settings without the unified cache, flash attention off and on
(`-fa off -no-kvu` is its best known one on CPUs); its default, both on, is reported beside it. Each side runs in a
process of its own, in turns; a figure is the median of its turns. On both sides threads spin at barriers as libgomp
does by default. `core_wait` is the share of the time that threads were ready but had no core: over some 0.05 the
machine was not quiet and the ratios say little.

    python benchmarks/engine_decode.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, comparable, model_path, quantisations
from support.report import AT_LEAST, Row, main, progress

from kvstore_engine.bench.against import DEFAULT, OURS, decode_speeds, decoders

TARGETS = {1: 1.1, 4: 1.3, 8: 1.4, 16: 1.6}
PROMPT_TOKENS = 256


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
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
