"""The suite behind `make bench`: every benchmark in a process of its own, one table or one JSON list at the end.

Progress goes to standard error. With --json the last line of standard output is a list of objects with name, value,
unit, baseline and ratio, and with baseline_name, bound, target and met. A benchmark that cannot run here (an extra is
missing, say) is named with its reason and left out; the exit code is 1 when one failed or missed its target.

    python benchmarks/run.py [--json] [--quick] [--only NAME ...]
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.report import parser_of, progress, table

HERE = Path(__file__).parent
TIMEOUT_S = 240


@dataclass(frozen=True)
class Benchmark:
    """`arguments(quick)` goes on its command line; `lacks()` says why it cannot run here, or nothing."""

    name: str
    arguments: Callable[[bool], list[str]]
    lacks: Callable[[], str] = lambda: ""


def _json(quick: bool) -> list[str]:
    return ["--json", "--quick"] if quick else ["--json"]


def _quick(_: bool) -> list[str]:
    return ["--json", "--quick"]


def _without_engine() -> str:
    missing = [name for name in ("xllamacpp", "tokenizers") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} missing: pip install 'kvstored[engine]'" if missing else ""


SUITE = (
    Benchmark("daemon_start", _json),
    Benchmark("startup_scale", _json),
    Benchmark("lookup_latency", _json),
    Benchmark("index_probe", _json),
    Benchmark("token_containers", _json),
    Benchmark("get_lease", _json),
    Benchmark("get_layers", _json),
    Benchmark("put_copy", _json),
    Benchmark("durable_answer", _json),
    Benchmark("put_in_place", _json),
    Benchmark("ttft_restore", _json, _without_engine),
    Benchmark("many_clients", _json),
    Benchmark("degraded", _json, _without_engine),
    Benchmark("vs_llama_server", _json, _without_engine),
    Benchmark("engine_decode", _quick, _without_engine),
)


def main() -> int:
    parser = parser_of(__doc__ or "", "fewer rounds: noisier, and done within a minute or two")
    parser.add_argument("--only", action="append", choices=[one.name for one in SUITE], help="run just this one")
    options = parser.parse_args()
    objects: list[dict[str, Any]] = []
    failed = False
    for benchmark in SUITE:
        if options.only and benchmark.name not in options.only:
            continue
        reason = benchmark.lacks()
        if reason:
            progress(f"{benchmark.name}: left out, {reason}")
            continue
        found = _run(benchmark, options.quick)
        failed = failed or not found
        objects += found
    print(json.dumps(objects) if options.json else table(objects))
    return int(failed or any(fields.get("met") is False for fields in objects))


def _run(benchmark: Benchmark, quick: bool) -> list[dict[str, Any]]:
    """The rows of one benchmark; on failure reports it and returns none."""
    started = time.monotonic()
    progress(f"{benchmark.name} ...")
    command = [sys.executable, str(HERE / f"{benchmark.name}.py"), *benchmark.arguments(quick)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        progress(f"{benchmark.name}: FAILED, not done in {TIMEOUT_S} s")
        return []
    lines = done.stdout.splitlines()
    if not lines:
        progress(f"{benchmark.name}: FAILED with exit code {done.returncode}")
        return []
    progress(f"{benchmark.name}: {time.monotonic() - started:.0f} s")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
