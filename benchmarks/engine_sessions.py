"""Conversations that come back when there are more of them than memory holds: time to first token.

`kvengine serve` with kvstored against llama.cpp's server with `--cache-ram`, at equal memory for K and V: what ours
has in its pool and in the daemon's DRAM (swap space has none, staging is part of that DRAM), theirs has in its slots
and its prompt cache. All conversations together need 1.5 times that, so neither side holds them; a slot is as long as
the longest conversation and no longer, since what a slot does not need llama.cpp's cache can use. Four clients; each
conversation's next turn comes after all others had theirs, in another order each time, and its history holds made-up
answers, the same for both sides. The sides take turns, started anew each time; counted is the median over the later
turns of each, over HTTP, and of these the median. llama.cpp's server runs at its best setting
(`-fa off -no-kvu -np 4`).

Also reported: the share of the later turns' tokens that each side computed, which shows that memory did not hold them,
and the memory that the processes of each side use at the end, weights and code included.

Expected: what memory does not hold ours restores from NVMe in some 10 ms, where theirs computes 1,000 tokens again. A
least-recently-used cache under a load that returns in turns keeps little even of what would fit.

    python benchmarks/engine_sessions.py [--json] [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import median

from support.daemon import bench_daemon
from support.engine import THREADS, comparable, model_path
from support.report import Row, main, progress

from kvstore_engine.bench.arrivals import ClosedLoop
from kvstore_engine.bench.ggml_build import family, same_build
from kvstore_engine.bench.loads import LoadSettings, make_load
from kvstore_engine.bench.outcome import Outcome, Run
from kvstore_engine.bench.over_http import Endpoint, run_over_http
from kvstore_engine.bench.servers import Running, best_on_cpus, llama_server, our_server
from kvstore_engine.bench.summary import Summary, summarise
from kvstore_engine.bench.workload import Workload
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig

CLIENTS, TURNS, TARGET = 4, 3, 0.5
OVERCOMMIT = 1.5
CONTEXT_STEP = 256  # llama.cpp rounds the context of a slot up to this
FIRST, LATER = "first turn", "later turn"


@dataclass(frozen=True)
class Memory:
    """For K and V on either side: `context` tokens for each client, and `cache_mib` behind them."""

    context: int
    slot_bytes: int
    cache_mib: int


@dataclass(frozen=True)
class Seen:
    """Of one run of one side. `resident_bytes`: of its processes, shared pages counted once."""

    turns: dict[str, Summary]
    resident_bytes: int
    libraries: frozenset[Path]

    def ttft_ms(self, kind: str) -> float:
        return self.turns[kind].ttft_s["p50"] * 1e3

    @property
    def computed_share(self) -> float:
        """Of the later turns' tokens."""
        later = self.turns[LATER]
        return (later.computed_tokens or 0) / later.prompt_tokens


def measure(quick: bool) -> list[Row]:
    load = LoadSettings(
        requests=TURNS * (12 if quick else 16), prompt_tokens=512 if quick else 1024, generate_tokens=32
    )
    workload = make_load("multi-turn", load)
    memory = _memory(workload)
    ours, theirs = [], []
    for _ in range(1 if quick else 2):
        theirs.append(_theirs(workload, memory))
        ours.append(_ours(workload, memory))
    if not same_build(ours[0].libraries, theirs[0].libraries):
        raise SystemExit("the two sides did not run the same ggml build: no comparison")
    return [
        _row("ttft_later_turns", "ms", ours, theirs, lambda seen: seen.ttft_ms(LATER), TARGET),
        _row("ttft_first_turns", "ms", ours, theirs, lambda seen: seen.ttft_ms(FIRST)),
        _row("computed_of_later_turns", "", ours, theirs, lambda seen: seen.computed_share),
        _row("resident_in_all", "MiB", ours, theirs, lambda seen: seen.resident_bytes / 2**20),
    ]


def _row(
    name: str,
    unit: str,
    ours: list[Seen],
    theirs: list[Seen],
    figure: Callable[[Seen], float],
    target: float | None = None,
) -> Row:
    mine, other = (median(map(figure, side)) for side in (ours, theirs))
    return Row(name, mine, unit, other, f"{unit}, llama.cpp".removeprefix(", "), target=target)


def _memory(workload: Workload) -> Memory:
    with GGUFFile.open(model_path("q4_0")) as file:
        config = ModelConfig.from_gguf(file)
    token_bytes = 2 * config.layers * config.kv_width * 2
    last = [request for request in workload.requests if request.id.endswith(f"turn-{TURNS - 1}")]
    needed = token_bytes * sum(len(request.tokens) + request.max_tokens for request in last)
    context = -(-workload.longest_tokens // CONTEXT_STEP) * CONTEXT_STEP
    slots = token_bytes * context * CLIENTS
    cache_mib = round(needed / OVERCOMMIT - slots) >> 20
    progress(
        f"{len(last)} conversations of {TURNS} turns, {needed >> 20} MiB of K/V in the end; each side has "
        f"{slots >> 20} MiB of slots (a pool) for {context} tokens each, and {cache_mib} MiB behind them"
    )
    return Memory(context, slots, cache_mib)


def _theirs(workload: Workload, memory: Memory) -> Seen:
    settings = best_on_cpus(THREADS, CLIENTS, memory.context, memory.cache_mib)
    with llama_server(model_path("q4_0"), settings) as server:
        return _asked(server, workload, "llama.cpp")


def _ours(workload: Workload, memory: Memory) -> Seen:
    with bench_daemon(f"host.capacity={memory.cache_mib}MiB", "host.arena=8MiB", "nvme.capacity=8GiB") as daemon:
        options = ["--context", str(memory.context), "--max-sequences", str(CLIENTS), "--pool", str(memory.slot_bytes)]
        options += ["--swap", "0", "--kvstore", str(daemon.socket_dir)]
        with our_server(model_path("q4_0"), THREADS, options, comparable()) as server:
            return _asked(server, workload, "ours", daemon.pid)


def _asked(server: Running, workload: Workload, name: str, *others: int) -> Seen:
    """One turn of all conversations, then the next: each user waits for the answer before the next turn."""
    outcomes: list[Outcome] = []
    seconds = 0.0
    for _, turn in groupby(workload.requests, lambda request: request.id.rpartition("-")[2]):
        run = run_over_http(Endpoint(server.url), Workload(workload.name, "", tuple(turn)), ClosedLoop(CLIENTS))
        outcomes += run.outcomes
        seconds += run.seconds
    if failed := [outcome for outcome in outcomes if not outcome.ok]:
        raise SystemExit(f"{name}: {len(failed)} requests failed: {failed[0].message}")
    found = {kind: summarise(Run(outcomes, seconds), kind) for kind in (FIRST, LATER)}
    resident = sum(_resident_bytes(pid) for one in (server.pid, *others) for pid in family(one))
    seen = Seen(found, resident, server.libraries())
    progress(
        f"{name}: first turn {seen.ttft_ms(FIRST):.0f} ms, later {seen.ttft_ms(LATER):.0f} ms, "
        f"{seen.computed_share:.0%} of their tokens computed; {resident >> 20} MiB resident; {seconds:.0f} s"
    )
    return seen


def _resident_bytes(pid: int) -> int:
    """Of this process, by the kernel's proportional count: a page that n processes map is an n-th for each."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
