"""`kvstored inspect`: shows a slot, a block or a key of an NVMe directory, also while a daemon uses it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvstore_console.command_line import Commands
from kvstore_console.table import render_facts
from kvstored.cli.check import what_is_wrong
from kvstored.exits import EXIT_OK, failure, mistake

EXAMPLES = """\
examples:
  kvstored inspect /var/lib/kvstored/nvme slot 3:17
  kvstored inspect /var/lib/kvstored/nvme block 051e43b1d68c
  kvstored inspect /var/lib/kvstored/nvme key 051e43b1d68c --every-slot
  kvstored inspect /var/lib/kvstored/nvme block 051e43b1d68c --json | jq '.slots[0].verified'

Shows keys, sizes and checksums; token ids are counted and payload is verified, neither is shown. Nothing is changed.
With a daemon on the directory it reads beside it and says so. Why a block left, and when, only the daemon remembers:
kvctl explain KEY.
exit status: 0 shown; 1 it is not there or cannot be read; 2 a mistake in the arguments
"""


def add_inspect(commands: Commands) -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a slot, a block or what is known of a key in an NVMe directory",
        description="Show a slot, a block or what is known of a key in an NVMe directory.",
        epilog=EXAMPLES,
    )
    inspect.add_argument("directory", type=Path)
    inspect.add_argument("what", choices=["slot", "block", "key"], help="what NAME names")
    inspect.add_argument(
        "name", metavar="NAME", help="of a slot SLAB:INDEX; of a block or key its hex digits, or the first 6 or more"
    )
    inspect.add_argument(
        "--every-slot", action="store_true", help="key: also look for old bytes of it in free slots (slow)"
    )
    inspect.add_argument("--json", action="store_true", help="one JSON object")
    inspect.set_defaults(run=_inspect)


def _inspect(arguments: argparse.Namespace) -> int:
    from kvstore_tiers.nvme.directory_files import DirectoryError
    from kvstore_tiers.nvme.inspect import Inspector, NotAKey, NotThere

    if wrong := what_is_wrong(arguments.directory):
        return mistake(wrong)
    try:
        inspector = Inspector(arguments.directory)
        if arguments.what == "slot":
            slab, _, index = arguments.name.partition(":")
            if not (slab.isdecimal() and index.isdecimal()):
                return mistake(f"a slot is named SLAB:INDEX, such as 3:17, not {arguments.name!r}")
            report = inspector.slot(int(slab), int(index))
        elif arguments.what == "block":
            report = inspector.block(arguments.name)
        else:
            report = inspector.key(arguments.name, every_slot=arguments.every_slot)
    except NotAKey as error:
        return mistake(str(error))
    except NotThere as error:
        return failure(str(error))
    except (OSError, DirectoryError) as error:
        return failure(f"cannot look into {arguments.directory}: {error}")
    if arguments.json:
        print(json.dumps({**_named(report.facts), "slots": [_named(fields) for fields in report.slots]}))
        return EXIT_OK
    _print(report.facts, "")
    for fields in report.slots:
        print(f"slot {fields['slab']}:{fields['slot']}")
        _print({name: value for name, value in fields.items() if name not in ("slab", "slot")}, "  ")
    if not report.slots:
        print("no record names it; why it is missing: kvctl explain KEY")
    return EXIT_OK


def _print(fields: dict[str, object], indent: str) -> None:
    print(render_facts([(name, _shown(value)) for name, value in fields.items()], indent))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _named(fields: dict[str, object]) -> dict[str, object]:
    return {name.replace(" ", "_"): value for name, value in fields.items()}
