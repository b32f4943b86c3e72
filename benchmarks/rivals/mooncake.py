"""Mooncake Store beside kvstored: batches of values over a TCP loopback, against shared memory.

Its memory is lent by a process of its own and the client lends none, as between an engine and a storage node. A client
that held the values itself would only copy within one process, and not share them with any other.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack

from support.daemon import bench_daemon
from support.report import Row

from rivals.contender import WORKERS, Command, contender
from rivals.environments import MOONCAKE, in_network_namespace
from rivals.limits import copies
from rivals.values import IN_PLACE, OURS, SIZES_MIB, VALUES, WARM_UP, arenas_mib, compare_values

NAME = "Mooncake TCP"
QUIET = {"GLOG_minloglevel": "2"}


def compare(quick: bool) -> list[Row]:
    MOONCAKE.ensure()
    rounds = 3 if quick else 7
    segment_mib = (rounds + WARM_UP + 1) * VALUES * max(SIZES_MIB) * 5 // 4 + 512
    script, master = WORKERS / "mooncake_client.py", MOONCAKE.bin("mooncake_master")
    command: Command = [MOONCAKE.bin("python"), script, master, str(segment_mib << 20)]
    mib = arenas_mib(rounds)
    settings = (f"host.capacity={mib + 512}MiB", f"host.prefault_ahead={mib}MiB", "nvme.enabled=false")
    with ExitStack() as stack:
        daemons = {
            OURS: stack.enter_context(bench_daemon(*settings)),
            IN_PLACE: stack.enter_context(bench_daemon(*settings, "put.in_place=true")),
        }
        contenders = {}
        for name, daemon in daemons.items():
            ours: Command = [sys.executable, WORKERS / "kvstored_client.py", daemon.socket_dir, "values"]
            contenders[name] = stack.enter_context(contender(name, ours))
        contenders[NAME] = stack.enter_context(contender(NAME, in_network_namespace(command), QUIET))
        alone = stack.enter_context(copies())

        def ready() -> None:
            for daemon in daemons.values():
                daemon.wait_prefaulted(mib << 20, timeout_s=120)

        return compare_values(contenders, alone, rounds, ready)
