"""Measures how soon the daemon serves, and what it weighs before it has a client.

The default configuration with empty directories. Ready is from before the process is started until it says READY=1;
resident memory is read when it has been idle for a moment. The first start compiles byte code, which an installed
daemon has, and is not counted. The limits are promises. In turns with the daemon, an interpreter imports what it
stands on (grpc, numpy, xxhash, the generated messages) and nothing of ours: its figures are what is possible.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from support.daemon import bench_daemon, byte_code
from support.report import AT_MOST, Row, main, median

IDLE_S = 0.5
MB = 1e6
READY_S, RSS_MB = 1.0, 80.0
BARE_NAME = "bare imports"
BARE = """
import asyncio, grpc.aio, numpy, xxhash
from grpc_health.v1 import health
from kvstore_proto.v1 import admin_pb2_grpc, handshake_pb2, kvstore_pb2_grpc, unary_pb2_grpc
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmRSS:")), flush=True)
"""


def bare_start() -> tuple[float, int]:
    """Return the seconds until a new interpreter has imported `BARE`, and its resident bytes then."""
    variables = {**os.environ, **byte_code(), "OPENBLAS_NUM_THREADS": "1"}  # as the daemon says
    started = time.perf_counter()
    with subprocess.Popen([sys.executable, "-c", BARE], env=variables, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        resident = int(child.stdout.readline()) * 1024
        ready_s = time.perf_counter() - started
    return ready_s, resident


def measure(quick: bool) -> list[Row]:
    ready: list[float] = []
    resident: list[float] = []
    bare: list[tuple[float, int]] = []
    with bench_daemon():  # not counted, as the bare one is not
        bare_start()
    for _ in range(3 if quick else 5):
        with bench_daemon() as daemon:
            time.sleep(IDLE_S)
            ready.append(daemon.ready_s)
            resident.append(daemon.rss_bytes())
        bare.append(bare_start())
    bare_s, bare_bytes = (median(values) for values in zip(*bare, strict=True))
    return [
        Row("daemon_ready", median(ready), "s", READY_S, "limit", AT_MOST, 1.0, bare_s, BARE_NAME),
        Row("daemon_ready_vs_imports", median(ready), "s", bare_s, BARE_NAME),
        Row("daemon_idle_rss", median(resident) / MB, "MB", RSS_MB, "limit", AT_MOST, 1.0, bare_bytes / MB, BARE_NAME),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
