"""Conversations that come back when there are more of them than memory holds: time to first token.

`kvengine serve` with kvstored against llama.cpp's server with `--cache-ram`, at equal memory for K and V: what ours
has in its pool, in its swap space and in the daemon's DRAM, theirs has in its slots and its prompt cache. All
conversations together need 1.5 times that. Four clients; each conversation's next turn comes after all others had
theirs, in another order each time, and its history holds made-up answers, the same for both sides. Counted is the
median over the later turns, over HTTP. llama.cpp's server runs at its best setting (`-fa off -no-kvu -np 4`).

Expected: what memory does not hold ours restores from NVMe in some 10 ms, where theirs computes 1,000 tokens again. A
least-recently-used cache under a load that returns in turns keeps little even of what would fit.

    python benchmarks/engine_sessions.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.daemon import bench_daemon
from support.engine import THREADS, comparable, model_path
from support.report import Row, main, progress

from kvstore_engine.bench.arrivals import ClosedLoop
from kvstore_engine.bench.loads import LoadSettings, make_load
from kvstore_engine.bench.over_http import Endpoint, run_over_http
from kvstore_engine.bench.servers import best_on_cpus, llama_server, our_server
from kvstore_engine.bench.summary import Summary, summarise
from kvstore_engine.bench.workload import Workload
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig

CLIENTS, TURNS, TARGET = 4, 3, 0.5
CONTEXT_TOKENS = 2048
OVERCOMMIT = 1.5
LATER = "later turn"


def measure(quick: bool) -> list[Row]:
    model = model_path("q4_0")
    load = LoadSettings(requests=TURNS * (12 if quick else 24), prompt_tokens=1024, generate_tokens=32)
    workload = make_load("multi-turn", load)
    with GGUFFile.open(model) as file:
        config = ModelConfig.from_gguf(file)
    token_bytes = 2 * config.layers * config.kv_width * 2
    needed = token_bytes * sum(len(request.tokens) + request.max_tokens for request in _last_turns(workload))
    slots = token_bytes * CONTEXT_TOKENS * CLIENTS
    cache = max(16 << 20, round(needed / OVERCOMMIT) - slots)
    progress(f"{needed >> 20} MiB of K/V wanted; {slots >> 20} MiB of slots and {cache >> 20} MiB of cache")
    theirs = _theirs(workload, cache >> 20)
    ours = _ours(workload, cache, slots)
    return [
        _row("ttft_later_turns", ours, theirs, LATER, TARGET),
        _row("ttft_first_turns", ours, theirs, "first turn", None),
    ]


def _row(name: str, ours: dict[str, Summary], theirs: dict[str, Summary], kind: str, target: float | None) -> Row:
    mine, other = (side[kind].ttft_s["p50"] * 1e3 for side in (ours, theirs))
    return Row(name, mine, "ms", other, "ms, llama.cpp", target=target)


def _last_turns(workload: Workload) -> list[object]:
    return [request for request in workload.requests if request.id.endswith(f"turn-{TURNS - 1}")]


def _theirs(workload: Workload, cache_mib: int) -> dict[str, Summary]:
    settings = best_on_cpus(THREADS, CLIENTS, CONTEXT_TOKENS, cache_mib)
    with llama_server(model_path("q4_0"), settings) as server:
        return _asked(server.url, workload, "llama.cpp")


def _ours(workload: Workload, cache_bytes: int, pool_bytes: int) -> dict[str, Summary]:
    with bench_daemon(f"host.capacity={cache_bytes}", "host.arena=8MiB", "nvme.capacity=8GiB") as daemon:
        options = ["--context", str(CONTEXT_TOKENS), "--max-sequences", str(CLIENTS), "--pool", str(pool_bytes)]
        options += ["--swap", "0", "--kvstore", str(daemon.socket_dir)]
        with our_server(model_path("q4_0"), THREADS, options, comparable()) as server:
            return _asked(server.url, workload, "ours")


def _asked(url: str, workload: Workload, name: str) -> dict[str, Summary]:
    run = run_over_http(Endpoint(url), workload, ClosedLoop(CLIENTS))
    found = {kind: summarise(run, kind) for kind in ("first turn", LATER)}
    told = ", ".join(f"{kind} {summary.ttft_s['p50'] * 1e3:.0f} ms" for kind, summary in found.items())
    later = found[LATER]
    progress(f"{name}: {told}; {later.computed_tokens} of {later.prompt_tokens} tokens computed in later turns")
    if failed := sum(summary.failed for summary in found.values()):
        raise SystemExit(f"{name}: {failed} requests failed")
    return found


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
