"""The commands of kvctl: parse, run one, print. The module maps each failure to an exit code."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
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
from kvstore_console.command_line import report_error

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


def run(words: Sequence[str]) -> int:
    """Do what the command line `words` says and return the exit code."""
    if of_kvstored := words_for_kvstored(words):
        return run_kvstored(of_kvstored)
    return _print(parse(words))


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
