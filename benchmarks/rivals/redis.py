"""redis beside kvstored: batches of values over a Unix socket, against shared memory.

The plain key-value yardstick, in memory only (no snapshots, no log). Two clients, one with MSET and MGET and one with
a pipeline of 64 commands; the better counts.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from support.daemon import bench_daemon
from support.report import Row

from rivals.contender import WORKERS, Command, ContenderError, contender, server
from rivals.environments import REDIS, redis_server
from rivals.limits import copies
from rivals.values import OURS, arenas_mib, compare_values

STYLES = {"redis MSET/MGET": "multi", "redis pipeline": "pipeline"}
START_TIMEOUT_S = 10.0


def compare(quick: bool) -> list[Row]:
    binary = redis_server()
    REDIS.ensure()
    rounds = 3 if quick else 7
    mib = arenas_mib(rounds)
    settings = (f"host.capacity={mib + 512}MiB", f"host.prefault_ahead={mib}MiB", "nvme.enabled=false")
    with ExitStack() as stack:
        daemon = stack.enter_context(bench_daemon(*settings))
        path = stack.enter_context(_redis(binary))
        ours: Command = [sys.executable, WORKERS / "kvstored_client.py", daemon.socket_dir, "values"]
        contenders = {OURS: stack.enter_context(contender(OURS, ours))}
        for name, style in STYLES.items():
            theirs: Command = [REDIS.bin("python"), WORKERS / "redis_client.py", path, style]
            contenders[name] = stack.enter_context(contender(name, theirs))
        alone = stack.enter_context(copies())
        ready = partial(daemon.wait_prefaulted, mib << 20, timeout_s=120)
        return compare_values(contenders, alone, rounds, ready)


@contextmanager
def _redis(binary: Path) -> Iterator[Path]:
    """A server on a Unix socket of its own, which keeps nothing on disk."""
    with tempfile.TemporaryDirectory(prefix="kvredis-") as directory:
        path = Path(directory) / "redis.sock"
        command: Command = [
            binary, "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", directory,
            "--proto-max-bulk-len", "64mb",
        ]  # fmt: skip
        with server("redis-server", command) as log:
            deadline = time.monotonic() + START_TIMEOUT_S
            while not path.exists():
                if time.monotonic() > deadline:
                    raise ContenderError(f"redis-server did not start:\n{log.read_text()}")
                time.sleep(0.02)
            yield path
