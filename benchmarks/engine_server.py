"""Streaming clients over HTTP: `kvengine serve` against its engine without HTTP, and against llama.cpp's own server.

Each client sends a prompt of about 256 unrelated tokens, reads 64 streamed ones and sends the next. The sides take
turns under the same prompts; a figure is the median of its turns.

- `http_1`: one client, tokens a second, against the engine in one process, called without HTTP. `http_1_decode`: the
  tokens after the first alone. Both sides have their defaults.
- `throughput_1` to `throughput_8`, and `throughput` of 16: against llama.cpp's server on the same ggml build. Best:
  `-fa off -no-kvu -np N -c ...`, a slot for each client. Default: no option but model and threads, which is four slots
  over a unified cache with flash attention. Latencies are medians over requests, from the sending on.
- Possible are the tokens a second if our engine did nothing but multiply with the matrices, by our kernels, as many
  threads and the baseline's instructions. A token costs its share of a step of one row a client, which reads all
  weights once; a prompt token what a row more costs in a step of 256. Measured before and behind the servers' turns
  in the same run; the faster counts.

    python benchmarks/engine_server.py [--json] [--quick]
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.engine import THREADS, comparable, model_path, quantisations
from support.report import AT_LEAST, AT_MOST, Row, main, median, progress

from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.against import OURS, Comparison, compare, context_for, decoders
from kvstore_engine.bench.child import ServerChild, answer_questions
from kvstore_engine.bench.in_process import BenchEngine, opened, run_in_process
from kvstore_engine.bench.over_http import MeasuredServer, run_over_http
from kvstore_engine.bench.servers import our_server
from kvstore_engine.bench.summary import BenchmarkRun, summarise
from kvstore_engine.bench.workload import ClosedLoop, LoadSettings, Workload, make_load

CHILD = "without-http"
TARGETS = {1: 2.0, 4: 2.8, 8: 3.0, 16: 3.0}
WITHOUT_HTTP = 0.9
MULTIPLIED_STEPS = 12
SIZES = LoadSettings(requests=4)
Figures = dict[str, float]


def measure(quick: bool) -> list[Row]:
    rows = []
    for quantisation in quantisations(quick):
        rows += http_rows(quantisation, rounds=3 if quick else 9)
        rows += llama_rows(quantisation, quick)
    return rows


def http_rows(quantisation: str, rounds: int) -> list[Row]:
    """Return the rows of one client over HTTP against the engine without HTTP, in `rounds` turns of each."""
    model, context = model_path(quantisation), context_for([_load(turn) for turn in range(rounds + 1)])
    options = ["--context", str(context), "--max-sequences", "1", "--no-access-log"]
    environment = {**comparable(), "PYTHONPATH": str(Path(__file__).parent)}
    child = ServerChild("engine_server", [CHILD, str(model), str(context)], environment)
    with contextlib.closing(child), our_server(model, THREADS, options, comparable()) as server:
        endpoint = MeasuredServer(server.url)
        sides: dict[str, Callable[[int], Figures]] = {
            "http": lambda turn: _figures(run_over_http(endpoint, _load(turn), ClosedLoop(1))),
            CHILD: lambda turn: dict(child.ask({"turn": turn})),
        }
        found: dict[str, list[Figures]] = {name: [] for name in sides}
        for turn in range(rounds + 1):
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                found[name].append(sides[name](turn))
    # The first turn warms up.
    ours, plain = (
        {key: median([each[key] for each in found[side][1:]]) for key in ("all", "decode")} for side in sides
    )
    progress(f"{quantisation}: over HTTP {ours['all']:.0f} tokens/s, without {plain['all']:.0f}")
    name, other = f"{quantisation}_http_1", "the same without HTTP"
    return [
        Row(name, ours["all"], "tokens/s", plain["all"], other, AT_LEAST, WITHOUT_HTTP),
        Row(f"{name}_decode", ours["decode"], "tokens/s", plain["decode"], other, AT_LEAST, WITHOUT_HTTP),
    ]


def _load(turn: int) -> Workload:
    """Return the requests of a turn: no server has blocks of an earlier turn's prompts."""
    return make_load("chat", LoadSettings(requests=SIZES.requests, seed=1 + 100 * turn))


def _figures(run: BenchmarkRun) -> Figures:
    """Return the tokens a second of a run, prompts included, and those behind the first of each answer."""
    summary = summarise(run)
    if summary.failed:
        raise SystemExit(f"{summary.failed} of {summary.requests} requests failed")
    return {"all": summary.generated_per_s, "decode": 1 / summary.tpot_s["p50"]}


def _without_http(model: Path, context: int) -> None:
    """Answer questions with the figures of a turn, as a child process."""
    wanted = BenchEngine(model, context, sequences=1, threads=THREADS, settings=EngineSettings(max_running=1))
    with opened(wanted) as engine:
        answer_questions(lambda asked: _figures(run_in_process(engine, _load(asked["turn"]), ClosedLoop(1))))


def llama_rows(quantisation: str, quick: bool) -> list[Row]:
    """Return the rows of 1, 4, 8 and 16 clients against llama.cpp's server."""
    wanted = Comparison(
        model_path(quantisation), THREADS, tuple(TARGETS), rounds=1 if quick else 3, requests_each=1 if quick else 3
    )
    with decoders(wanted.model, THREADS, comparable()) as sides:
        before = _possible(sides[OURS], wanted.load)
        result = compare(wanted, progress, decode=False)
        behind = _possible(sides[OURS], wanted.load)
    if not result["same_ggml_build"]:
        raise SystemExit("the two sides did not run the same ggml build: no comparison")
    possible = {clients: max(before[clients], behind[clients]) for clients in TARGETS}
    return [row for each in result["rows"] for row in _rows(quantisation, each, possible[each["concurrency"]])]


def _possible(products: ServerChild, load: LoadSettings) -> dict[int, float]:
    """Return for each number of clients the tokens a second of `load` if only products were computed, by the process
    `products`.
    """

    def step_s(rows: int, *, head: bool) -> float:
        asked = {"products": True, "sequences": rows, "steps": MULTIPLIED_STEPS, "seed": 1, "head": head}
        return float(min(products.ask(asked)["seconds"]))

    prompt_s = step_s(load.prompt_tokens, head=False)
    found = {}
    for clients in TARGETS:
        more_s = (prompt_s - step_s(clients, head=False)) / (load.prompt_tokens - clients)
        token_s = step_s(clients, head=True) / clients + more_s * load.prompt_tokens / load.generate_tokens
        found[clients] = 1 / token_s
    progress("products alone, tokens/s: " + ", ".join(f"{clients}: {per_s:.0f}" for clients, per_s in found.items()))
    return found


def _rows(name: str, row: dict[str, Any], possible: float) -> list[Row]:
    def one(
        what: str, figure: str, unit: str, other: str, bound: str, target: float | None, limit: float | None = None
    ) -> Row:
        ours, theirs = row[f"{figure}_ours"], row[f"{figure}_{other}"]
        alone = "products alone" if limit else ""
        return Row(f"{name}_{what}", ours, unit, theirs, f"llama.cpp, {other}", bound, target, limit, alone)

    clients = row["concurrency"]
    if clients < max(TARGETS):
        return [one(f"throughput_{clients}", "throughput", "tokens/s", "best", AT_LEAST, TARGETS[clients], possible)]
    return [
        one("throughput", "throughput", "tokens/s", "best", AT_LEAST, TARGETS[clients], possible),
        one("ttft", "ttft_p50_s", "s", "best", AT_MOST, 0.4),
        one("tpot", "tpot_p50_s", "s", "best", AT_MOST, 1.1),
        one("throughput_default", "throughput", "tokens/s", "default", AT_LEAST, 2.0),
    ]


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        _without_http(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main(measure, __doc__))
