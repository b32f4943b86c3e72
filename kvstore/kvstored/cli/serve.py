"""`kvstored serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import os
import signal

from kvstore_console.command_line import Commands
from kvstored.cli.configure import add_settings, overrides
from kvstored.exits import failure, mistake

EXAMPLES = """\
examples:
  kvstored serve                                  with what the configuration file says, or else the defaults
  kvstored serve --config ./kvstored.toml
  kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state --set host.capacity=2GiB --set nvme.capacity=8GiB
  kvstored serve --record ./today.jsonl.gz        records what clients ask for, for kvstored simulate
  kvstored serve --new-secret                     once, where the secret is lost and there is no backup of it
  kvstored serve --discard-old                    once, after an update whose formats are others
  kvstored serve --check-config --config ./kvstored.toml      before a restart: does it start with this?
  kvstored config                                 prints every setting, its default and what it means

Ready when `kvctl ping` answers. SIGHUP reads the configuration again (as `kvctl reload`); one that cannot be used
changes nothing. SIGTERM stops in order and keeps DRAM for the next start where host.warm_restart
says so; Ctrl-C stops in order and gives the memory back.
exit status: 0 it was stopped; 1 it could not start or go on; 2 a mistake in the arguments or the
configuration, or a secret that is not the one of the blocks; 4 it could not stop in order, because a disk hangs
"""


def add_serve(commands: Commands) -> None:
    serve = commands.add_parser(
        "serve",
        help="run the daemon in the foreground",
        description="Run the daemon in the foreground until it is stopped (SIGTERM, or Ctrl-C).",
        epilog=EXAMPLES,
    )
    add_settings(serve)
    serve.add_argument("--record", metavar="FILE", help="short for --set daemon.record=FILE")
    serve.add_argument(
        "--log-level", choices=["debug", "info", "warning", "error"], help="short for --set daemon.log_level=LEVEL"
    )
    serve.add_argument(
        "--check-config",
        action="store_true",
        help="say whether the configuration can be used, and exit: 0 it can, 2 it cannot",
    )
    serve.add_argument(
        "--new-secret",
        action="store_true",
        help="where the state directory's secret is lost or another: drop the blocks that it does not reach and go on",
    )
    serve.add_argument(
        "--discard-old",
        action="store_true",
        help="remove what an older version wrote and this one cannot read, and go on; else it is named and left",
    )
    serve.set_defaults(run=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    import gc

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it can read the configuration again
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy would start a thread a core, for work that is not done
    gc.disable()  # until it serves: what a start makes is there to stay, and to look through it would cost 0.1 s
    from kvstored.config import ConfigError, load_config
    from kvstored.log_setup import set_up_logging

    given = overrides(arguments, "record", "log_level")
    try:
        config = load_config(arguments.config, given)
    except ConfigError as error:
        return mistake(str(error))
    if arguments.check_config:
        print(f"{config.source}: the configuration can be used")
        return 0
    set_up_logging(config.daemon.log_level)
    from kvstore_tiers.failpoints import ENVIRONMENT, unknown_names
    from kvstore_tiers.nvme.early_scan import EarlyRecordScan
    from kvstored import __version__
    from kvstored.clock import SystemClock
    from kvstored.process import set_limits
    from kvstored.state.process import StateProcess

    set_limits(config.daemon.nice)
    clock = SystemClock()
    state = StateProcess(config.daemon.state_dir, __version__, clock)
    state.start()  # it loads its modules meanwhile, and opens nothing yet
    ahead = EarlyRecordScan.begin(config.nvme.path) if config.nvme.enabled else None  # while modules are loaded
    try:
        from kvstored.daemon import StartupError
        from kvstored.daemon_process import run_daemon

        if unknown_names():  # every module has declared its own by now
            return mistake(f"{ENVIRONMENT} arms what does not exist: {', '.join(unknown_names())}")
        try:
            read = lambda: load_config(arguments.config, given)  # noqa: E731
            return run_daemon(
                config, clock, read, state, ahead, new_secret=arguments.new_secret, discard_old=arguments.discard_old
            )
        except StartupError as error:
            return failure(str(error))
    except ConfigError as error:  # what the configuration names turned out not to be usable
        return mistake(str(error))
    finally:
        if ahead is not None:
            ahead.close()
