"""What an install without a C++ compiler costs: step time with the numba kernel against the C++ kernel.

The same engine in two processes, one with $KVENGINE_KERNEL=numba, in turns; decode steps of 1, 8 and 16 sequences with
contexts of some 256 and 1,024 tokens. Both kernels use what the machine has.

Expected: matrix products are ggml's on both sides, only attention differs: numba's is some 2 to 3 times slower, so the
step is nearly the same on short contexts, and worst with many sequences of long ones.

    python benchmarks/engine_no_compiler.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, model_path
from support.report import Row, main
from support.timing import median

from kvstore_engine.bench.child import Child

TARGET = 1.7
KERNELS = ("cpp", "numba")
MODULE = "kvstore_engine.bench.decoding"


def measure(quick: bool) -> list[Row]:
    arguments = ["ours", str(model_path("q4_0")), str(THREADS)]
    contexts = (256,) if quick else (256, 1024)
    with (
        Child(MODULE, arguments, {"KVENGINE_KERNEL": KERNELS[0]}) as cpp,
        Child(MODULE, arguments, {"KVENGINE_KERNEL": KERNELS[1]}) as numba,
    ):
        return [_row((cpp, numba), count, context, 1 if quick else 3) for context in contexts for count in (1, 8, 16)]


def _row(sides: tuple[Child, Child], count: int, context: int, rounds: int) -> Row:
    steps: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        question = {"sequences": count, "prompt_tokens": context, "steps": 32, "seed": 1 + turn}
        for found, side in zip(steps, sides, strict=True):
            found.extend(side.ask(question)["seconds"])
    cpp, numba = (median(found) * 1e3 for found in steps)
    return Row(f"numba_step_{count}x{context}", numba, "ms", cpp, "ms, C++", target=TARGET)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
