"""kvctl state shows the databases of the daemon's small state, and the entries of one; it also reads a directory
without a daemon.

A running daemon answers from the file that it has open. With --state-dir the program kvstored reads the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from google.protobuf.json_format import ParseDict

from kvctl.connection import AdminSocket
from kvctl.output import FAILED, CommandError, Output
from kvstore_console.table import render_facts, render_table
from kvstore_console.units import human_bytes, human_count
from kvstore_proto.v1 import admin_pb2 as wire

MOST = 10_000  # values in one answer
EXAMPLES = (
    "the small state of the daemon, as its state directory has it: its databases, and what is in one",
    [
        "kvctl state ls",
        "kvctl state show endurance",
        "kvctl --json state show usage --limit 2 | jq .values",
        "kvctl state ls --state-dir /var/lib/kvstored     # where no daemon answers: as kvstored inspect",
    ],
)


def add_state_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["ls", "show"], help="what to do")
    parser.add_argument("database", nargs="?", default="", metavar="DATABASE", help="show: which; ls names them")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="show: at most N values (default: 100)")
    parser.add_argument(
        "--first", default="", metavar="HEX", help="show: begin at this key, as the last answer named it"
    )
    parser.add_argument("--state-dir", metavar="DIR", help="read this directory, not the daemon's")


def check_state(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if (arguments.action == "show") != bool(arguments.database):
        parser.error("state: give `ls`, or `show DATABASE`; ls names the databases")
    if not 0 <= arguments.limit <= MOST:
        parser.error(f"state: --limit is a number of values, 1 to {MOST}")


def state(directory: Path, arguments: argparse.Namespace) -> Output:
    """Return a list of the databases in the daemon's state directory, or the entries of the database that `arguments`
    name.
    """
    request = wire.StateRequest(database=arguments.database, first=arguments.first, limit=arguments.limit)
    if arguments.state_dir is not None:
        reply = _asked_of_file(request, arguments.state_dir)
    else:
        with AdminSocket(directory, arguments.timeout) as admin:
            reply = admin.call("State", request, wire.StateReply)
    entries = [json.loads(entry) for entry in reply.values]
    if arguments.action == "show":
        text = "\n".join(line_of(entry) for entry in entries) or f"{arguments.database} is empty"
        text += f"\nmore: --first {reply.next}" if reply.next else ""
        return Output(text, {"database": arguments.database, "values": entries, "next": reply.next})
    facts = [
        ("file", f"{reply.path} ({human_bytes(reply.bytes)})"),
        ("wrong values, rows", f"{reply.wrong_values}, {reply.wrong_rows}; nothing uses them"),
    ]
    if arguments.state_dir is None:
        facts.append(("read", "yes" if reply.is_read else "not yet: the daemon serves before"))
        facts.append(("process", f"{reply.pid} ({human_bytes(reply.rss_bytes)})"))
    facts += [("set aside", reply.set_aside)] if reply.set_aside else []
    rows = [[each.name, human_count(each.values), human_bytes(each.bytes), each.holds] for each in reply.databases]
    table = render_table(("DATABASE", ">VALUES", ">BYTES", "WHAT IS IN IT"), rows)
    return Output(f"{render_facts(facts)}\n\n{table}", reply)


def line_of(entry: Mapping[str, object]) -> str:
    """Return the text of `entry`, an entry of a database, on one line."""
    return "  ".join(f"{name}={value}" for name, value in entry.items())


def _asked_of_file(request: wire.StateRequest, directory: str) -> wire.StateReply:
    """Have the program kvstored read the state directory `directory`."""
    command = [sys.executable, "-m", "kvstored", "inspect", directory, "state"]
    command += [request.database] if request.database else []
    command.append("--json")
    command += ["--limit", str(request.limit)] if request.limit else []
    command += ["--first", request.first] if request.first else []
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = ran.stderr.strip().removeprefix("kvstored: ")
        raise CommandError(FAILED, said or "the program kvstored is not here, or says nothing")
    return ParseDict(json.loads(ran.stdout), wire.StateReply())
