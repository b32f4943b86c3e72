"""kvstored beside LMCache, Mooncake and redis: the same work, in turns, from processes of the same kind.

Each rival is installed on first use into an environment of its own, .venv-rivals-NAME, after a progress line says so;
redis-server must be installed. Nothing listens outside this machine: LMCache is on the loopback, redis on a Unix
socket, Mooncake in a network namespace of its own. Progress goes to standard error; with --json the last line of
standard output is a list of objects as in benchmarks/run.py. Exit code: 0 all targets met, 1 a target missed, 2 a rival
could not be set up or failed.

    python benchmarks/rivals/run.py [--json] [--quick] [--only lmcache,mooncake,redis]
    python benchmarks/rivals/run.py --only redis --quick
    python benchmarks/rivals/run.py --setup-only
    python benchmarks/vs_lmcache.py               equal to --only lmcache; likewise vs_mooncake.py, vs_redis.py
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.report import Row, parser_of, printed, progress

from rivals import lmcache, values
from rivals.contender import ContenderError
from rivals.environments import LMCACHE, MOONCAKE, REDIS, CannotSetUp

COMPARISONS = {
    "lmcache": (lmcache.compare, LMCACHE),
    "mooncake": (values.compare_mooncake, MOONCAKE),
    "redis": (values.compare_redis, REDIS),
}


def main(rivals: Sequence[str] = tuple(COMPARISONS)) -> int:
    """Compare with the `rivals` that the command line leaves in."""
    parser = parser_of(__doc__ or "", "fewer rounds: noisier")
    parser.add_argument("--only", type=_names, default=list(rivals), help="names, separated by commas")
    parser.add_argument("--setup-only", action="store_true", help="install the rivals and stop")
    options = parser.parse_args()
    rows: list[Row] = []
    failed = False
    for name in options.only:
        compare, environment = COMPARISONS[name]
        started = time.monotonic()
        try:
            environment.ensure()
            if not options.setup_only:
                progress(f"{name} ...")
                rows += compare(options.quick)
                progress(f"{name}: {time.monotonic() - started:.0f} s")
        except (CannotSetUp, ContenderError, TimeoutError) as error:
            progress(f"{name}: FAILED, {error}")
            failed = True
    is_missed = 0 if options.setup_only else printed(rows, as_json=options.json)
    return 2 if failed else is_missed


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = sorted(set(names) - set(COMPARISONS))
    if unknown or not names:
        known = ", ".join(COMPARISONS)
        raise argparse.ArgumentTypeError(f"unknown rival {', '.join(unknown) or repr(text)}; known: {known}")
    return names


if __name__ == "__main__":
    sys.exit(main())
