"""Measures this engine beside llama.cpp, in one run: servers over HTTP, and decoding alone.

The module owns the turns and the ratios. Sides take turns, one at a time, and each figure is the median of its turns,
so that a slow minute of the machine hits all sides alike. A ratio is this engine over llama.cpp: over 1 is more
throughput, under 1 less latency. Invariant: there is a ratio only if both sides ran one ggml build, and this engine's
kernels use only instructions that the build uses too.

At a barrier libgomp's threads spin before they sleep. Over HTTP each side has its own default (this engine sleeps
early, to leave the cores to its other processes); decoding alone both spin as libgomp does by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from kvstore_engine.bench.child import ServerChild
from kvstore_engine.bench.ggml_build import cpu_features, kernel_environment, mapped_libraries, same_build
from kvstore_engine.bench.over_http import MeasuredServer, run_over_http
from kvstore_engine.bench.servers import LlamaServerSettings, Running, best_on_cpus, llama_server, our_server
from kvstore_engine.bench.summary import Summary, summarise
from kvstore_engine.bench.workload import ClosedLoop, LoadSettings, Workload, make_load
from kvstore_engine.errors import OperationError
from kvstore_engine.ggml import find_library

OURS, DEFAULT, BEST, PRODUCTS = "ours", "default", "best", "products"
_PLAIN, _FLASH = "plain", "flash"
_LIBGOMP_SPINS = {"GOMP_SPINCOUNT": "300000"}
_PAD_TOKENS = 256
Row = dict[str, Any]
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The settings of a comparison of this engine with llama.cpp. `program` is the path of a llama-server; None takes
    the one in the wheel `xllamacpp`. `concurrency` lists numbers of clients. Each figure is the median of `rounds`
    measurements of each side, made in turns.
    """

    model: Path
    threads: int
    concurrency: Sequence[int] = (1, 4, 8, 16)
    rounds: int = 3
    load: LoadSettings = field(default_factory=LoadSettings)
    load_name: str = "chat"
    requests_each: int = 3
    decode_steps: int = 48
    program: Path | None = None


def compare(wanted: Comparison, progress: Progress, *, server: bool = True, decode: bool = True) -> dict[str, Any]:
    """Measure this engine and llama.cpp in turns, as `wanted` says. Return rows of figures, one for each number of
    clients, and facts that show whether the two can be compared. `server` includes the servers over HTTP, `decode`
    decoding without HTTP. `progress` gets a line of text after each row.
    """
    builds = _Builds()
    with llama_server(wanted.model, LlamaServerSettings(wanted.threads), wanted.program) as probe:
        builds.see(probe)
    rows = [_server_row(wanted, count, builds, progress) for count in wanted.concurrency] if server else []
    # Decoding alone calls llama.cpp's library, which is the one that our engine uses, regardless of the server.
    decode_rows = []
    if decode:
        with decoders(wanted.model, wanted.threads, kernel_environment(cpu_features(find_library()))) as sides:
            decode_rows = [_decode_row(wanted, count, sides, progress) for count in wanted.concurrency]
    return {
        "baseline": str(wanted.program or "xllamacpp"),
        "baseline_cpu_features": builds.features,
        "same_ggml_build": builds.same,
        "rows": rows,
        "decode_rows": decode_rows,
    }


class _Builds:
    """The builds that the sides were seen to run."""

    def __init__(self) -> None:
        self.features: list[str] = []
        self.same = True

    def see(self, baseline: Running) -> None:
        """Note which ggml a running server of llama.cpp has, and whether it equals this engine's."""
        found = find_library()
        ours = [found] if found.is_file() else sorted(found.glob("libggml*.so*"))
        theirs = baseline.libraries()
        self.same = same_build({path.resolve() for path in ours}, {path.resolve() for path in theirs})
        if theirs:
            first = next(iter(theirs))
            self.features = cpu_features(first if "xllamacpp" in first.name else first.parent)

    @property
    def environment(self) -> dict[str, str]:
        return kernel_environment(self.features)


def _server_row(wanted: Comparison, count: int, builds: _Builds, progress: Progress) -> Row:
    sizes = replace(wanted.load, requests=max(4, wanted.requests_each * count))
    turns = turn_loads(wanted, sizes)
    context = context_for(turns)
    with contextlib.ExitStack() as stack:
        sides: dict[str, Running] = {}
        ours = our_server(
            wanted.model, wanted.threads, ["--context", str(context), "--max-sequences", str(count)], builds.environment
        )
        sides[OURS] = stack.enter_context(ours)
        for name, settings in (
            (BEST, best_on_cpus(wanted.threads, count, context)),
            (DEFAULT, LlamaServerSettings(wanted.threads)),
        ):
            sides[name] = stack.enter_context(llama_server(wanted.model, settings, wanted.program))
        builds.same &= same_build(sides[OURS].libraries(), sides[BEST].libraries())
        found: dict[str, list[Summary]] = {name: [] for name in sides}
        warm = make_load("decode", replace(sizes, requests=count, generate_tokens=4, seed=sizes.seed + 7))
        for side in sides.values():
            run_over_http(MeasuredServer(side.url), warm, ClosedLoop(count))
        for turn, asked in enumerate(turns):
            for name in _rotated(list(sides), turn):
                run = run_over_http(MeasuredServer(sides[name].url), asked, ClosedLoop(count))
                summary = summarise(run)
                if summary.failed:
                    message = next(outcome.message for outcome in run.outcomes if not outcome.ok)
                    raise OperationError(f"{name}: {summary.failed} of {summary.requests} requests failed: {message}")
                found[name].append(summary)
    figures = {name: _median_figures(summaries) for name, summaries in found.items()}
    row: Row = {"concurrency": count, "load": wanted.load_name, "requests": sizes.requests, **_ratios(figures, builds)}
    for name, values in figures.items():
        row |= {f"{figure}_{name}": value for figure, value in values.items()}
    speeds_text = ", ".join(f"{name} {values['throughput']:.0f}" for name, values in figures.items())
    progress(f"{count} clients over HTTP, generated tokens/s: {speeds_text}")
    return row


def turn_loads(wanted: Comparison, sizes: LoadSettings) -> list[Workload]:
    """Return the requests for each turn of the comparison `wanted`, in the given `sizes`. The prompts differ from turn
    to turn, so that no server has blocks of an earlier turn.
    """
    seeds = [sizes.seed + 100 * turn for turn in range(wanted.rounds)]
    return [make_load(wanted.load_name, replace(sizes, seed=seed)) for seed in seeds]


def context_for(turns: Sequence[Workload]) -> int:
    """Return the context in tokens that the longest request in the loads `turns` needs, rounded up to a multiple of
    256.
    """
    return -(-(max(load.longest_tokens for load in turns) + 1) // _PAD_TOKENS) * _PAD_TOKENS


def _rotated(names: list[str], turn: int) -> list[str]:
    """Return `names` rotated, so that each turn begins with another side."""
    at = turn % len(names)
    return names[at:] + names[:at]


def _median_figures(summaries: Sequence[Summary]) -> dict[str, float]:
    return {
        "throughput": median(summary.generated_per_s for summary in summaries),
        "ttft_p50_s": median(summary.ttft_s["p50"] for summary in summaries),
        "ttft_p99_s": median(summary.ttft_s["p99"] for summary in summaries),
        "tpot_p50_s": median(summary.tpot_s["p50"] for summary in summaries),
        "inter_token_p99_s": median(summary.inter_token_s["p99"] for summary in summaries),
    }


def _ratios(figures: dict[str, dict[str, float]], builds: _Builds) -> dict[str, float | None]:
    def ratio(figure: str, other: str) -> float | None:
        theirs = figures[other][figure]
        return figures[OURS][figure] / theirs if builds.same and theirs else None

    return {
        "throughput_ratio_default": ratio("throughput", DEFAULT),
        "throughput_ratio_best": ratio("throughput", BEST),
        "ttft_ratio_best": ratio("ttft_p50_s", BEST),
        "tpot_ratio_best": ratio("tpot_p50_s", BEST),
        "ttft_ratio_default": ratio("ttft_p50_s", DEFAULT),
        "tpot_ratio_default": ratio("tpot_p50_s", DEFAULT),
    }


@dataclass(frozen=True, slots=True)
class DecodeSpeeds:
    """The decoding speeds of this engine and of llama.cpp with several settings (the sides of a comparison), at one
    number of sequences. `per_s` has the tokens a second of each side by name, the median of its turns. `core_wait` has
    the share of its time in which its threads waited for a core; above about 0.05 the machine was too busy for the
    figures to mean much.
    """

    per_s: dict[str, float]
    core_wait: dict[str, float]

    @property
    def best(self) -> float:
        """The tokens a second of llama.cpp with the faster of its two settings that give each sequence a K/V buffer of
        its own.
        """
        return max(self.per_s[_PLAIN], self.per_s[_FLASH])


@contextlib.contextmanager
def decoders(model: Path, threads: int, environment: dict[str, str]) -> Iterator[dict[str, ServerChild]]:
    """Start a child process for each side of a comparison (this engine, and llama.cpp with several settings), and give
    the `with` block the processes by name. They run the model file `model` with `threads` threads.
    """
    module, arguments = "kvstore_engine.bench.decoding", [str(model), str(threads)]
    with (
        contextlib.closing(ServerChild(module, [OURS, *arguments], {**_LIBGOMP_SPINS, **environment})) as ours,
        # Set for this side, too, so that it does not inherit another count from this process.
        contextlib.closing(ServerChild(module, ["llama", *arguments], _LIBGOMP_SPINS)) as llama,
    ):
        yield {OURS: ours, _PLAIN: llama, _FLASH: llama, DEFAULT: llama}


def decode_speeds(
    sides: dict[str, ServerChild], count: int, *, prompt_tokens: int, steps: int, rounds: int, **ours: object
) -> DecodeSpeeds:
    """Let each process in `sides` decode `count` sequences, in `rounds` turns of `steps` steps, after prompts of
    `prompt_tokens` tokens. Return the speeds. `ours` are further settings for this engine alone.
    """
    settings: dict[str, dict[str, object]] = {
        OURS: ours,
        PRODUCTS: {"products": True},
        _PLAIN: {"flash": False, "unified": False},
        _FLASH: {"flash": True, "unified": False},
        DEFAULT: {"flash": True, "unified": True},
    }
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    waits: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds):
        asked = {"sequences": count, "prompt_tokens": prompt_tokens, "steps": steps, "seed": 1 + turn}
        for name in _rotated(list(sides), turn):
            answer = sides[name].ask({**asked, **settings[name]})
            taken = sum(answer["seconds"])
            speeds[name].append(count * len(answer["seconds"]) / taken)
            waits[name].append(answer["core_wait_s"] / taken)
    return DecodeSpeeds(
        {name: median(values) for name, values in speeds.items()},
        {name: median(values) for name, values in waits.items()},
    )


def _decode_row(wanted: Comparison, count: int, sides: dict[str, ServerChild], progress: Progress) -> Row:
    speeds = decode_speeds(
        sides, count, prompt_tokens=wanted.load.prompt_tokens, steps=wanted.decode_steps, rounds=wanted.rounds
    )
    same = same_build(mapped_libraries([sides[OURS].pid]), mapped_libraries([sides[DEFAULT].pid]))
    ours, default = speeds.per_s[OURS], speeds.per_s[DEFAULT]
    speeds_text = ", ".join(f"{name} {value:.0f}" for name, value in speeds.per_s.items())
    progress(f"{count} sequences without HTTP, tokens/s: {speeds_text}")
    return {
        "concurrency": count,
        "throughput_ratio_default": ours / default if same else None,
        "throughput_ratio_best": ours / speeds.best if same else None,
        "throughput_ours": ours,
        "throughput_best": speeds.best,
        "throughput_default": default,
        "core_wait": max(speeds.core_wait.values()),
    }
