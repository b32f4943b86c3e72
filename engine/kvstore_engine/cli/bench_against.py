"""`kvengine bench --against llama-server`: the comparison, as a table or as JSON.

Owns the reading of its options and what is printed where.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from kvstore_engine.bench.against import Comparison, compare
from kvstore_engine.cli.bench_options import load_settings, progress, vocabulary_of
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.models import locate
from kvstore_engine.threads import default_threads

_ROUNDS, _QUICK_ROUNDS = 3, 1


def run(options: argparse.Namespace) -> int:
    """Compare as `options` say; 0, or an error that `main` turns into an exit code."""
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
        _write(options, result)
    print(json.dumps(result) if options.json else _text(result))
    return 0


def _write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "against.json").write_text(json.dumps(result, indent=1) + "\n")
    except OSError as error:
        raise OperationError(f"cannot write to {options.out}: {error.strerror}") from None


def _text(result: dict[str, Any]) -> str:
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
