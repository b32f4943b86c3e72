"""`kvengine bench`: measures an engine or a server, or compares with llama.cpp's, and prints the figures.

The module reads options, sets the sizes of --quick and of the default load, and prints figures on stdout, progress on
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kvstore_console.table import render_table
from kvstore_console.units import human_seconds
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.against import Comparison, compare
from kvstore_engine.bench.in_process import BenchEngine
from kvstore_engine.bench.over_http import MeasuredServer
from kvstore_engine.bench.report import as_json, write_files
from kvstore_engine.bench.study import Case, StudySettings, study_engine, study_server
from kvstore_engine.bench.workload import LOADS, Arrivals, ClosedLoop, LoadSettings, OpenLoop
from kvstore_engine.devices import CPU
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.models.locate import locate
from kvstore_engine.profiler import TracingObserver
from kvstore_engine.threads import default_threads

_CONCURRENCY = (1, 4, 8, 16)
_MOST_SEQUENCES = 256
_HEADINGS = (
    "load", "arrivals", ">blocks", ">tokens/s", ">TTFT p50", ">p99", ">TPOT p50", ">p99", ">computed/ideal",
)  # fmt: skip
UNKNOWN_VOCABULARY = 32000
_QUICK = LoadSettings(requests=8, prompt_tokens=64, generate_tokens=16)
_ROUNDS, _QUICK_ROUNDS = 3, 1
_OF_ENGINE = (
    ("policy", "fcfs"), ("kv_dtype", "f16"), ("device", CPU),
    ("block_sizes", None), ("pool_tokens", None), ("trace", None),
)  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Run `kvengine bench` with the command line's `options`: measure, print the figures and return exit code 0. Raises
    UsageError for options that do not go together, OperationError if requests fail.
    """
    _check(options)
    if options.against:
        return _run_against(options)
    cases = list(_server(options) if options.url else _engine(options))
    about = _about(options)
    written = write_files(options.out, about, cases) if options.out else []
    if options.json:
        print(json.dumps(as_json(about, cases)))
    else:
        print(_text(cases))
        for path in written:
            print(f"wrote {path}")
    failed = sum(case.summary.failed for case in cases)
    if failed:
        raise OperationError(f"{failed} of {sum(case.summary.requests for case in cases)} requests failed")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Report mistakes in the options before a model is loaded."""
    if not options.model and not options.url:
        raise UsageError("nothing to measure: give --model MODEL, or --url of a running server")
    if unknown := [name for name in options.load if name not in LOADS]:
        raise UsageError(f"load {unknown[0]!r} is unknown; known: {', '.join(LOADS)}")
    if options.against and options.url:
        raise UsageError("--against starts both servers itself: give --model, not --url")
    if options.against and not options.model:
        raise UsageError("--against needs --model MODEL")
    for name, needs in (("llama_server", "against"), ("only", "against"), ("rounds", "against")):
        if getattr(options, name) is not None and not getattr(options, needs):
            raise UsageError(f"--{name.replace('_', '-')} goes with --against llama-server")
    if options.against and (ignored := [name for name, default in _OF_ENGINE if getattr(options, name) != default]):
        given = f"--{ignored[0].replace('_', '-')}"
        raise UsageError(f"{given} is not for --against, whose engines run as kvengine serve does by default")
    if options.url and (options.trace or options.block_sizes or options.pool_tokens):
        raise UsageError("--trace, --block-sizes and --pool-tokens are for an engine in this process, not for --url")
    for count in options.concurrency or ():
        if not 1 <= count <= _MOST_SEQUENCES:
            raise UsageError(f"the concurrency must be 1 to {_MOST_SEQUENCES}, got {count}")
    for size in options.block_sizes or ():
        if not 8 <= size <= 256:
            raise UsageError(f"a block holds 8 to 256 tokens, not {size}")


def _arrivals(options: argparse.Namespace) -> Sequence[Arrivals]:
    if options.rate:
        return [OpenLoop(rate, options.seed) for rate in options.rate]
    return [ClosedLoop(count) for count in options.concurrency or ((4,) if options.quick else _CONCURRENCY)]


def _engine(options: argparse.Namespace) -> Iterator[Case]:
    path = locate(options.model)
    settings = load_settings(options, vocabulary_of(path))
    arrivals = _arrivals(options)
    most = max((each.concurrency for each in arrivals if isinstance(each, ClosedLoop)), default=16)
    wanted = StudySettings(options.load, arrivals, settings, options.block_sizes or (16,))
    base = BenchEngine(
        path,
        context=0,
        sequences=most,
        threads=options.threads,
        kv_dtype=options.kv_dtype,
        pool_tokens=options.pool_tokens,
        settings=EngineSettings(policy=options.policy, max_running=most, max_queued=max(1024, settings.requests)),
        device=options.device,
    )
    with contextlib.ExitStack() as stack:
        tracing = TracingObserver(options.trace) if options.trace else None
        if tracing:
            stack.callback(tracing.close)
        yield from study_engine(base, wanted, progress(options), tracing)


def _server(options: argparse.Namespace) -> Iterator[Case]:
    settings = load_settings(options, UNKNOWN_VOCABULARY)
    endpoint = MeasuredServer(options.url, options.model, options.api_key)
    yield from study_server(endpoint, StudySettings(options.load, _arrivals(options), settings), progress(options))


def _about(options: argparse.Namespace) -> dict[str, object]:
    about: dict[str, object] = {"model": options.model, "url": options.url, "seed": options.seed}
    if not options.url:
        from kvstore_engine.ggml import load_library
        from kvstore_engine.kernels import select_kernels

        about |= {
            "device": options.device,
            "policy": options.policy,
            "kv_dtype": options.kv_dtype,
            "kernels": select_kernels().name,
        }
        about |= {"threads": options.threads or default_threads(), "ggml": load_library().describe()["version"]}
    return {**about, "machine": platform.machine(), "python": platform.python_version()}


def _text(cases: Sequence[Case]) -> str:
    rows = []
    for case in cases:
        summary, ratio = case.summary, case.evaluated_ratio
        latencies = (summary.ttft_s["p50"], summary.ttft_s["p99"], summary.tpot_s["p50"], summary.tpot_s["p99"])
        rows.append([
            case.load, case.arrivals, str(case.block_tokens or ""), f"{summary.generated_per_s:.1f}",
            *map(human_seconds, latencies), "" if ratio is None else f"{ratio:.3f}",
        ])  # fmt: skip
    return render_table(_HEADINGS, rows)


def load_settings(options: argparse.Namespace, vocabulary: int) -> LoadSettings:
    """Return the sizes and the seed of the load to measure. `options` sets some; the others are the sizes of --quick or
    the defaults. `vocabulary` is the number of token ids to draw prompts from, unless `options` gives another.
    """
    base = _QUICK if options.quick else LoadSettings()
    return LoadSettings(
        requests=base.requests if options.requests is None else options.requests,
        prompt_tokens=base.prompt_tokens if options.prompt_tokens is None else options.prompt_tokens,
        generate_tokens=base.generate_tokens if options.generate_tokens is None else options.generate_tokens,
        vocabulary=options.vocabulary or vocabulary,
        seed=options.seed,
    )


def vocabulary_of(path: Path) -> int:
    """Return the number of token ids in the vocabulary of the model file `path`."""
    with GGUFFile.open(path) as file:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list | tuple) else UNKNOWN_VOCABULARY


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """Return a function that prints a line of progress on stderr, or one that does nothing if `options.quiet` is
    set.
    """
    return (lambda text: None) if options.quiet else (lambda text: print(text, file=sys.stderr, flush=True))


def _run_against(options: argparse.Namespace) -> int:
    """Compare as `options` say; return 0, or raise an error that `main` turns into an exit code."""
    if options.rate:
        raise UsageError("--against is a closed loop: give --concurrency, not --rate")
    if len(options.load) > 1:
        raise UsageError("--against takes one load at a time")
    if options.llama_server is not None and not options.llama_server.is_file():
        raise UsageError(f"--llama-server {options.llama_server}: no such file")
    rounds = (_QUICK_ROUNDS if options.quick else _ROUNDS) if options.rounds is None else options.rounds
    if rounds < 1:
        raise UsageError(f"there must be at least 1 round, got {rounds}")
    path = locate(options.model)
    wanted = Comparison(
        path,
        threads=options.threads or default_threads(),
        concurrency=tuple(options.concurrency or ((1, 4) if options.quick else (1, 4, 8, 16))),
        rounds=rounds,
        load=load_settings(options, vocabulary_of(path)),
        load_name=options.load[0],
        decode_steps=16 if options.quick else 48,
        program=options.llama_server,
    )
    result = compare(
        wanted,
        progress(options),
        server=options.only != "decode",
        decode=options.only != "server",
    )
    result = {"model": path.name, "threads": wanted.threads, "rounds": rounds, **result}
    if options.out:
        _write_comparison(options, result)
    print(json.dumps(result) if options.json else _comparison_text(result))
    return 0


def _write_comparison(options: argparse.Namespace, result: dict[str, Any]) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "against.json").write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise OperationError(f"cannot write to {options.out}: {error.strerror}") from None


def _comparison_text(result: dict[str, Any]) -> str:
    lines = [f"{result['model']}, {result['threads']} threads, ours over llama.cpp's ({result['baseline']})"]
    if not result["same_ggml_build"]:
        lines.append("the two sides did not run the same ggml build: no ratios")
    for row in result["rows"]:
        lines.append(
            f"{row['concurrency']:>3} clients over HTTP: throughput {_times(row, 'throughput_ratio_best')} of its best "
            f"setting and {_times(row, 'throughput_ratio_default')} of its default, TTFT "
            f"{_times(row, 'ttft_ratio_best')}, TPOT {_times(row, 'tpot_ratio_best')}"
        )
    for row in result["decode_rows"]:
        lines.append(
            f"{row['concurrency']:>3} sequences, decoding alone: {row['throughput_ours']:.0f} tokens/s, "
            f"{_times(row, 'throughput_ratio_best')} of its best setting and "
            f"{_times(row, 'throughput_ratio_default')} of its default"
        )
    return "\n".join(lines)


def _times(row: dict[str, Any], name: str) -> str:
    return "?" if row[name] is None else f"{row[name]:.2f}x"
