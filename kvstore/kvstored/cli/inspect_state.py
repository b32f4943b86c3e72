"""`kvstored inspect DIRECTORY state` shows the small state of a state directory, or writes a copy of it for a backup.

A process of its own reads the file, as the daemon's process does: damage ends that process, and this one prints a line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvstored.exits import EXIT_OK, failure, mistake

if TYPE_CHECKING:
    from kvstored.state.process import StateProcess


def add_state_options(inspect: argparse.ArgumentParser) -> None:
    """Add the options of `kvstored inspect DIRECTORY state` to the parser `inspect`."""
    inspect.add_argument("--limit", type=int, default=0, metavar="N", help="state: at most N values (100)")
    inspect.add_argument("--first", default="", metavar="HEX", help="state: begin at this key")
    inspect.add_argument("--copy", type=Path, metavar="DIR", help="state: write a copy into this directory instead")


def inspect_state(arguments: argparse.Namespace) -> int:
    """Print the saved state in a state directory, or copy it, as `arguments` say. Return the exit status."""
    from kvstored import __version__
    from kvstored.admin.state import MOST
    from kvstored.clock import SystemClock
    from kvstored.state.process import StateProcess

    if not arguments.directory.is_dir():
        return mistake(f"{arguments.directory} is not a directory")
    if not 0 <= arguments.limit <= MOST:
        return mistake(f"--limit is a number of values, 1 to {MOST}")
    if arguments.copy is not None and not arguments.copy.is_dir():
        return mistake(f"--copy {arguments.copy} is not a directory")
    process = StateProcess(arguments.directory, __version__, SystemClock(), shared=True)
    try:
        asyncio.run(_show(process, arguments))
    except OSError as error:
        return failure(f"{error.filename or arguments.directory}: {error.strerror}")
    except LookupError as error:
        return mistake(str(error.args[0]))
    return EXIT_OK


async def _show(process: StateProcess, arguments: argparse.Namespace) -> None:
    from kvstore_console.table import render_table
    from kvstore_console.units import human_bytes, human_count
    from kvstore_proto.errors import KVStoreError
    from kvstore_proto.v1 import admin_pb2 as pb
    from kvstored.admin.state import look

    try:
        if arguments.copy is not None:
            path = await process.copy(arguments.copy)
            print(json.dumps({"copy": str(path)}) if arguments.json else f"copied to {path}")
            return
        request = pb.StateRequest(database=arguments.name, first=arguments.first, limit=arguments.limit)
        reply = await look(process, request)
    except KVStoreError as error:
        raise LookupError(error.message) from None
    finally:
        await process.close()
    if arguments.json:
        fields = ("name", "holds", "values", "bytes")
        databases = [{name: getattr(each, name) for name in fields} for each in reply.databases]
        found = {"path": reply.path, "bytes": reply.bytes, "wrong_values": reply.wrong_values, "next": reply.next}
        print(json.dumps({**found, "databases": databases, "values": list(reply.values)}))
    elif arguments.name:
        for entry in reply.values:
            print("  ".join(f"{name}={value}" for name, value in json.loads(entry).items()))
        print(f"more: --first {reply.next}" if reply.next else f"{arguments.name}: no more")
    else:
        rows = [[each.name, human_count(each.values), human_bytes(each.bytes), each.holds] for each in reply.databases]
        print(f"{reply.path} ({human_bytes(reply.bytes)})\n")
        print(render_table(("DATABASE", ">VALUES", ">BYTES", "WHAT IS IN IT"), rows))
