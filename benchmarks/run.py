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
from pathlib import Path
from typing import Any

from support.report import parser_of, progress, table

HERE = Path(__file__).parent
TIMEOUT_S = 240


SUITE = (
    "daemon_start", "startup_scale", "lookup_latency", "index_probe", "token_containers", "get_lease", "get_layers",
    "put_copy", "durable_answer", "put_in_place", "ttft_restore", "many_clients", "degraded", "vs_llama_server",
    "engine_decode",
)  # fmt: skip
OF_ENGINE = ("ttft_restore", "degraded", "vs_llama_server", "engine_decode")
ALWAYS_QUICK = ("engine_decode", "vs_llama_server")


def _lacks(name: str) -> str:
    """Return why the benchmark cannot run here, or nothing."""
    wanted = ("xllamacpp", "tokenizers") if name in OF_ENGINE else ()
    missing = [each for each in wanted if importlib.util.find_spec(each) is None]
    return f"{', '.join(missing)} missing: pip install '.[engine]'" if missing else ""


def main() -> int:
    parser = parser_of(__doc__ or "", "fewer rounds: noisier, and done within a minute or two")
    parser.add_argument("--only", action="append", choices=SUITE, help="run just this one")
    options = parser.parse_args()
    objects: list[dict[str, Any]] = []
    failed = False
    for name in SUITE:
        if options.only and name not in options.only:
            continue
        if reason := _lacks(name):
            progress(f"{name}: left out, {reason}")
            continue
        found = _run(name, options.quick or name in ALWAYS_QUICK)
        failed = failed or not found
        objects += found
    print(json.dumps(objects) if options.json else table(objects))
    return int(failed or any(fields.get("met") is False for fields in objects))


def _run(name: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of one benchmark; on failure reports it and returns none."""
    started = time.monotonic()
    progress(f"{name} ...")
    command = [sys.executable, str(HERE / f"{name}.py"), "--json", *(["--quick"] if quick else [])]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        progress(f"{name}: FAILED, not done in {TIMEOUT_S} s")
        return []
    lines = done.stdout.splitlines()
    if not lines:
        progress(f"{name}: FAILED with exit code {done.returncode}")
        return []
    progress(f"{name}: {time.monotonic() - started:.0f} s")
    found: list[dict[str, Any]] = json.loads(lines[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
