"""What an install without a C++ compiler costs: step time with the numba kernel against the C++ kernel.

The same engine in two processes, one with $KVENGINE_KERNEL=numba, in turns; decode steps of 1, 4, 8 and 16 sequences
with contexts of some 256 and 1,024 tokens, with q4_0 and q8_0 weights. Both kernels use what the machine has.

Expected: matrix products cost nearly the same on both sides, numba's attention is up to 2 times slower: the step is
nearly the same on short contexts, and worst with many sequences of long ones.

    python benchmarks/engine_no_compiler.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, model_path, quantisations
from support.report import Row, main
from support.timing import median

from kvstore_engine.bench.child import Child

TARGET = 1.7
KERNELS = ("cpp", "numba")
MODULE = "kvstore_engine.bench.decoding"


def measure(quick: bool) -> list[Row]:
    return [row for quantisation in quantisations(quick) for row in _rows(quantisation, quick)]


def _rows(quantisation: str, quick: bool) -> list[Row]:
    arguments = ["ours", str(model_path(quantisation)), str(THREADS)]
    contexts, rounds = ((256,), 1) if quick else ((256, 1024), 2)
    with (
        Child(MODULE, arguments, {"KVENGINE_KERNEL": KERNELS[0]}) as cpp,
        Child(MODULE, arguments, {"KVENGINE_KERNEL": KERNELS[1]}) as numba,
    ):
        return [
            _row((cpp, numba), f"numba_step_{quantisation}_{count}x{context}", count, context, rounds)
            for context in contexts
            for count in (1, 4, 8, 16)
        ]


def _row(sides: tuple[Child, Child], name: str, count: int, context: int, rounds: int) -> Row:
    steps: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        question = {"sequences": count, "prompt_tokens": context, "steps": 32, "seed": 1 + turn}
        for found, side in zip(steps, sides, strict=True):
            found.extend(side.ask(question)["seconds"])
    cpp, numba = (median(found) * 1e3 for found in steps)
    return Row(name, numba, "ms", cpp, "ms, C++", target=TARGET)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
