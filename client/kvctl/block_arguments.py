"""The options of `kvctl blocks`."""

from __future__ import annotations

import argparse
import re
from typing import Final

from kvstore_console.command_line import whole_number

TIERS: Final = ("host", "nvme")
CLASSES: Final = ("hot", "warm", "cold")
ORDERS: Final = ("size", "uses", "idle", "depth", "children", "leases")
GROUPS: Final = ("tenant", "model", "prefix")
DEFAULT_BLOCKS: Final = 50
positive_count = whole_number(1, 1_000_000)
PAGE_BLOCKS: Final = 1000  # of one request: the most that can be listed in an order, too


def add_block_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tier", choices=TIERS, default="", help="only blocks with a copy there")
    parser.add_argument("--tenant", default="", help="only this tenant's blocks")
    parser.add_argument("--prefix", type=_hex, default="", metavar="HEX", help="only keys that begin so")
    parser.add_argument(
        "--model", default="", help="only models with this in their label, or whose digest begins so (6 digits or more)"
    )
    parser.add_argument(
        "--class",
        dest="residency",
        choices=CLASSES,
        default="",
        help="only blocks of this class in the fastest tier that has them",
    )
    parser.add_argument("--sort", choices=ORDERS, default="", help="the most first; idle: the longest idle first")
    parser.add_argument("--reverse", action="store_true", help="with --sort: the least first")
    parser.add_argument(
        "--by", choices=GROUPS, default="", help="no list but sums by tenant, model or prefix, the largest first"
    )
    parser.add_argument(
        "--prefix-blocks",
        type=positive_count,
        metavar="N",
        help="with --by prefix: chains that begin alike for N blocks count together (default: 1)",
    )
    parser.add_argument(
        "--limit", type=positive_count, default=DEFAULT_BLOCKS, metavar="N", help="at most N (default: %(default)s)"
    )


def check_block_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Ends the program with one line for options that do not go together."""
    if arguments.by and (arguments.sort or arguments.reverse):
        parser.error("blocks: --by lists the largest sums first: leave --sort and --reverse out")
    if arguments.reverse and not arguments.sort:
        parser.error("blocks: --reverse turns an order round: add --sort")
    if arguments.prefix_blocks is not None and arguments.by != "prefix":
        parser.error("blocks: --prefix-blocks says how long a prefix is: add --by prefix")
    if (arguments.sort or arguments.by) and arguments.limit > PAGE_BLOCKS:
        parser.error(f"blocks: with --sort or --by, --limit is at most {PAGE_BLOCKS}")


def _hex(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{0,32}", text):
        raise argparse.ArgumentTypeError(f"a key begins with at most 32 hex digits, got {text!r}")
    return text
