"""Measures how soon the daemon serves, and what it weighs before it has a client.

The default configuration with empty directories. Ready is from before the process is started until it says READY=1;
resident memory is read when it has been idle for a moment. The limits are promises; the bare interpreter with what the
daemon stands on (grpc, numpy) is measured beside it, as the part that is not ours.
"""

from __future__ import annotations

import subprocess
import sys
import time

from support.daemon import bench_daemon
from support.report import Row, main, median, within

IDLE_S = 0.5
BARE = "import asyncio, grpc.aio, numpy, xxhash"


def measure(quick: bool) -> list[Row]:
    ready: list[float] = []
    bare: list[float] = []
    resident: list[float] = []
    for _ in range(2 if quick else 5):
        with bench_daemon() as daemon:
            time.sleep(IDLE_S)
            ready.append(daemon.ready_s)
            resident.append(daemon.rss_bytes())
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", BARE], check=True)
        bare.append(time.perf_counter() - started)
    return [
        within("daemon_ready", median(ready), "s", 1.0),
        Row("daemon_ready_vs_imports", median(ready), "s", median(bare), "bare imports"),
        within("daemon_idle_rss", median(resident) / 1e6, "MB", 80.0),
    ]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
