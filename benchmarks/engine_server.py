"""16 streaming clients: `kvengine serve` against llama.cpp's own server, over HTTP, on the same ggml build.

Each client sends a prompt of about 256 unrelated tokens, reads 64 streamed ones and sends the next. The servers take
turns under the same prompts; a figure is the median of its turns. Best: `-fa off -no-kvu -np 16 -c ...`, a slot for
each client. Default: no option but model and threads, which is four slots over a unified cache with flash attention.
Latencies are medians over requests, from the sending on.

    python benchmarks/engine_server.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, model_path, quantisations
from support.report import AT_LEAST, AT_MOST, Row, main, progress

from kvstore_engine.bench.against import Comparison, compare

CLIENTS = 16


def measure(quick: bool) -> list[Row]:
    rows = []
    for quantisation in quantisations(quick):
        wanted = Comparison(
            model_path(quantisation), THREADS, (CLIENTS,), rounds=1 if quick else 3, requests_each=1 if quick else 3
        )
        result = compare(wanted, progress, decode=False)
        if not result["same_ggml_build"]:
            raise SystemExit("the two sides did not run the same ggml build: no comparison")
        rows += _rows(quantisation, result["rows"][0])
    return rows


def _rows(name: str, row: dict[str, float]) -> list[Row]:
    def one(what: str, figure: str, unit: str, other: str, bound: str, target: float) -> Row:
        ours, theirs = row[f"{figure}_ours"], row[f"{figure}_{other}"]
        return Row(f"{name}_{what}", ours, unit, theirs, f"llama.cpp, {other}", bound, target)

    return [
        one("throughput", "throughput", "tokens/s", "best", AT_LEAST, 1.2),
        one("ttft", "ttft_p50_s", "s", "best", AT_MOST, 0.4),
        one("tpot", "tpot_p50_s", "s", "best", AT_MOST, 1.1),
        one("throughput_default", "throughput", "tokens/s", "default", AT_LEAST, 2.0),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
