"""kvctl's entry: parse, run one command, print, exit. The module maps each failure to an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from kvctl import act, show
from kvctl.act import predictor, quarantine, run_kvstored
from kvctl.arguments import parse, words_for_kvstored
from kvctl.bench import bench, ping
from kvctl.blocks import blocks
from kvctl.connection import AdminSocket
from kvctl.doctor.command import doctor
from kvctl.events import events
from kvctl.explain import explain
from kvctl.get import get, prefetch
from kvctl.keep import keep, versions
from kvctl.live import report
from kvctl.objects import objects
from kvctl.output import CommandError, Output
from kvctl.put import delete, put
from kvctl.show import config, tenants
from kvctl.state import state
from kvctl.top import top
from kvctl.warm import warm
from kvstore_client.paths import socket_directory
from kvstore_console.command_line import report_error, run_program

_COMMANDS: Final[dict[str, Callable[[AdminSocket, argparse.Namespace], Output]]] = {
    "status": show.status,
    "tiers": show.tiers,
    "tenants": tenants,
    "blocks": blocks,
    "drop": act.drop,
    "flush": act.flush,
    "drain": act.drain,
    "config": config,
    "reload": act.reload,
    "shutdown": act.shutdown,
    "invalidate": act.invalidate,
    "quarantine": quarantine,
    "predictor": predictor,
    "versions": versions,
}
# Commands that open their own connections: a session, the admin socket, or both.
_BY_DIRECTORY: Final[dict[str, Callable[[Path, argparse.Namespace], Output]]] = {
    "ping": ping,
    "top": top,
    "report": report,
    "doctor": doctor,
    "put": put,
    "get": get,
    "prefetch": prefetch,
    "delete": delete,
    "explain": explain,
    "bench": bench,
    "events": events,
    "pin": keep,
    "unpin": keep,
    "ttl": keep,
    "warm": warm,
    "state": state,
    "objects": objects,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvctl and return its exit code. An error is one line on standard error and, with --json, also one object on
    standard output.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # gRPC's own log lines are not for operators
    # A terminal that has no arrows and bars shows a question mark for each, so that columns stay aligned.
    words = list(sys.argv[1:] if argv is None else argv)
    of_kvstored = words_for_kvstored(words)
    run = partial(run_kvstored, of_kvstored) if of_kvstored else lambda: _print(parse(words))
    return run_program("kvctl", argv, run, unencodable="replace")


def _print(arguments: argparse.Namespace) -> int:
    try:
        output = _run(arguments)
    except CommandError as error:
        return report_error("kvctl", str(error), error.exit_code, **error.facts)
    print(output.render(as_json=arguments.json), file=sys.stderr if output.aside else sys.stdout, flush=True)
    return output.exit_code


def _run(arguments: argparse.Namespace) -> Output:
    directory = socket_directory(arguments.socket_dir)
    if arguments.command in _BY_DIRECTORY:
        return _BY_DIRECTORY[arguments.command](directory, arguments)
    with AdminSocket(directory, arguments.timeout) as admin:
        return _COMMANDS[arguments.command](admin, arguments)


if __name__ == "__main__":
    sys.exit(main())
