"""The command line of the commands that handle data: put, get, prefetch, delete, explain, bench."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

from kvstore_console.command_line import seconds, size, whole_number
from kvstore_proto.objects import DEFAULT_BLOCK_BYTES

DATA_EXAMPLES: Final = {
    "put": (
        "store a file, as a named object or as blocks of a token prefix",
        [
            "kvctl put --name greeting hello.txt",
            "tar c prompts | kvctl put --name prompts --replace -",
            "kvctl put --tokens 0-127 --fingerprint model.json kv.bin",
        ],
    ),
    "get": (
        "write what is stored to a file or to standard output",
        [
            "kvctl get --name greeting",
            "kvctl get --name prompts prompts.tar",
            "kvctl get --tokens-file prompt.ids --fingerprint 3fa9c0de --partial kv.bin",
        ],
    ),
    "prefetch": (
        "have blocks moved to DRAM before they are asked for",
        ["kvctl prefetch --name prompts --wait 10", "kvctl prefetch --tokens 0-2047 --fingerprint 3fa9c0de"],
    ),
    "delete": (
        "take blocks out of every tier for good",
        ["kvctl delete --name greeting", "kvctl delete --tokens 0-127 --fingerprint model.json"],
    ),
    "explain": (
        "where blocks are, or why they are missing",
        [
            "kvctl explain --name greeting",
            "kvctl explain --tokens 0-2047 --fingerprint 3fa9c0de",
            "kvctl explain 051e43b1d68c         # a key of `kvctl blocks`: it and the blocks before it",
            "kvctl explain --recent 20          # the last misses: which client, for what, and why",
        ],
    ),
    "bench": (
        "measure this daemon: echo, lookup, put, get, copied out",
        ["kvctl bench", "kvctl bench --blocks 32 --block-size 4MiB --rounds 20", "kvctl --json bench"],
    ),
}
WITH_TARGET: Final = ("put", "get", "prefetch", "delete", "explain")
DEFAULT_RECENT: Final = 20
MAX_BLOCK_BYTES: Final = 1 << 30
_group, _recent, _rounds = whole_number(0, 65535), whole_number(1, 4096), whole_number(2, 100_000)


def add_data_options(made: Mapping[str, argparse.ArgumentParser]) -> None:
    for name in WITH_TARGET:
        _target_options(made[name])
    _put_options(made["put"])
    made["get"].add_argument("file", nargs="?", default="-", help="where to write; - or nothing is standard output")
    made["get"].add_argument("--partial", action="store_true", help="take the leading blocks that there are")
    made["prefetch"].add_argument(
        "--budget", type=positive_size, default=0, metavar="SIZE", help="move at most this much"
    )
    made["prefetch"].add_argument(
        "--wait", type=seconds, metavar="S", help="wait until the blocks are there, at most S"
    )
    _explain_options(made["explain"])
    _bench_options(made["bench"])


def check_data_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program with a one-line error if options of the data commands do not go together."""
    if arguments.command not in WITH_TARGET:
        return
    command = arguments.command
    given = [
        option
        for option, value in (
            ("--name", arguments.name),
            ("--tokens", arguments.tokens),
            ("--tokens-file", arguments.tokens_file),
            ("KEY", getattr(arguments, "keys", None) or None),
            ("--recent", getattr(arguments, "recent", None)),
        )
        if value is not None
    ]
    if len(given) != 1:
        choices = "--name NAME, --tokens LIST or --tokens-file FILE"
        if command == "explain":
            choices = f"KEY..., {choices.replace(' or ', ', ')}, or --recent"
        parser.error(
            f"{command}: say which blocks with one of {choices}" + (f", not {' and '.join(given)}" * bool(given))
        )
    by_tokens = given[0] in ("--tokens", "--tokens-file")
    if by_tokens and not arguments.fingerprint:
        parser.error(
            f"{command}: {given[0]} needs --fingerprint FILE or DIGEST: another model has other blocks for them"
        )
    if given[0] in ("--name", "--recent") and arguments.fingerprint:
        parser.error(f"{command}: {given[0]} takes no --fingerprint")
    if not by_tokens and arguments.group is not None:
        parser.error(f"{command}: --group goes with --tokens or --tokens-file")
    if command == "explain" and arguments.tenant and given[0] not in ("KEY", "--recent"):
        parser.error(
            "explain: --tenant goes with KEY or --recent; keys of names and tokens are those of your own tenant"
        )


def positive_size(text: str) -> int:
    """Return the bytes of a size such as 4096, 64KiB or 1.5MiB. The result is at least 1."""
    if (value := size(text)) < 1:
        raise argparse.ArgumentTypeError(f"a size is above 0, got {text!r}")
    return value


def _target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", metavar="NAME", help="an object by its name, any bytes")
    parser.add_argument("--tokens", metavar="LIST", help="a prefix by its token ids, like 1,2,3 or 0-127")
    parser.add_argument("--tokens-file", metavar="FILE", help="the same, read from a file (- is standard input)")
    parser.add_argument(
        "--fingerprint",
        metavar="FILE|DIGEST",
        help="what the tokens' K/V depends on: canonical JSON, or a known digest",
    )
    parser.add_argument("--group", type=_group, metavar="N", help="layer group of the fingerprint (default: its first)")


def _put_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="what to store; - is standard input")
    parser.add_argument("--replace", action="store_true", help="delete an object of this name with other content first")
    parser.add_argument(
        "--durability",
        choices=("default", "none", "batch", "always"),
        default="default",
        help="none: DRAM only; batch, always: on NVMe before the command ends, also what is stored already "
        "(default: the tenant's)",
    )
    parser.add_argument(
        "--block-size",
        type=block_size,
        default=DEFAULT_BLOCK_BYTES,
        metavar="SIZE",
        help="named objects are cut into blocks of this size (default: 1MiB)",
    )


def _explain_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("keys", nargs="*", metavar="KEY", help="hex, whole or its first 6 digits or more")
    parser.add_argument(
        "--recent",
        type=_recent,
        nargs="?",
        const=DEFAULT_RECENT,
        metavar="N",
        help=f"the last N misses (default: {DEFAULT_RECENT})",
    )
    parser.add_argument("--tenant", default="", help="only this tenant's blocks or misses")


def _bench_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--blocks", type=_recent, default=64, metavar="N", help="blocks in one request (default: %(default)s)"
    )
    parser.add_argument(
        "--block-size", type=block_size, default=1 << 20, metavar="SIZE", help="payload of each (default: 1MiB)"
    )
    parser.add_argument(
        "--rounds", type=_rounds, default=30, metavar="N", help="measurements of each figure (default: %(default)s)"
    )
    parser.add_argument("--force", action="store_true", help="also where other blocks would have to leave DRAM for it")


def block_size(text: str) -> int:
    value = size(text)
    if not 4096 <= value <= MAX_BLOCK_BYTES:
        raise argparse.ArgumentTypeError(f"a block has 4KiB to 1GiB, got {text!r}")
    return value
