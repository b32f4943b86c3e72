"""The daemon's process: the signals that stop it, and its exit status."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable
from functools import partial

from kvstore_tiers.nvme.early_scan import EarlyRecordScan
from kvstored.clock import Clock
from kvstored.config import Config
from kvstored.daemon import Daemon
from kvstored.state.process import StateProcess

# No thread of ours computes for long with the GIL held, so a short interval wins nothing and costs the control thread
# the GIL in the middle of a request: with 0.5 ms lookups beside two clients at full load took half as long again.
SWITCH_INTERVAL_S = 0.005


def run_daemon(
    config: Config,
    clock: Clock,
    read: Callable[[], Config],
    state: StateProcess,
    early_scan: EarlyRecordScan | None = None,
    *,
    new_secret: bool = False,
    discard_old: bool = False,
) -> int:
    """Run the daemon until SIGTERM, SIGINT or a shutdown request, and return the exit status.

    `read` reads the configuration again. `state` talks to the process with the saved state. `early_scan` is a scan of
    the NVMe directory that has begun, or None. With `new_secret`, stored blocks whose keys cannot be made from the
    secret are dropped. With `discard_old`, files that an older version wrote and this one cannot read are removed.
    Raises StartupError and ConfigError."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    make = partial(Daemon, config, clock, read=read, state=state, early_scan=early_scan)
    return asyncio.run(_serve(partial(make, new_secret=new_secret, discard_old=discard_old)))


async def _serve(make: Callable[..., Daemon]) -> int:
    stop_wanted = asyncio.Event()
    loop = asyncio.get_running_loop()
    daemon = make(on_shutdown=stop_wanted.set)

    def interrupted() -> None:
        """Stop for an operator at a terminal, who wants the memory back; a service manager sends SIGTERM."""
        daemon.memory.is_forgotten = True
        daemon.asked_by = "SIGINT"
        stop_wanted.set()

    def terminated() -> None:
        daemon.asked_by = "SIGTERM"
        stop_wanted.set()

    loop.add_signal_handler(signal.SIGTERM, terminated)
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        await daemon.start()
        loop.add_signal_handler(signal.SIGHUP, daemon.reload.on_signal)
        await stop_wanted.wait()
    finally:
        await daemon.stop()
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_IGN)  # it has stopped in order, and its exit status is to say so
    return 0
