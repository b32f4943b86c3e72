"""kvctl blocks: its options, and a listing of stored blocks one by one, or of sums by tenant, model or prefix."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from kvctl.connection import AdminSocket
from kvctl.output import KEY_DIGITS, Output
from kvstore_console.command_line import whole_number
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire
from kvstore_proto.v1 import explain_pb2 as explain

_COLUMNS = (
    "KEY", "TENANT", "MODEL", ">DEPTH", ">SIZE", "TIERS", "STATE", "DURABILITY", "CLASS", ">USES", ">IDLE", ">LEASES",
    ">CHILDREN",
)  # fmt: skip
_TERMS = (">EXPIRES", ">PRIORITY", "PINNED BY", "KIND", "LOSSY IN")  # shown where a block listed has one
_PREFIX = ("PREFIX", "TENANT", "MODEL", ">LONGEST")
_NAMES = {"tenant": ("TENANT",), "model": ("MODEL",), "prefix": _PREFIX, "tree": (*_PREFIX, ">OWN", "CLASS")}
TIERS: Final = ("host", "nvme")
CLASSES: Final = ("hot", "warm", "cold")
ORDERS: Final = ("size", "uses", "idle", "depth", "children", "leases")
GROUPS: Final = ("tenant", "model", "prefix", "tree")
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
    parser.add_argument("--reverse", action="store_true", help="with --sort: ascending order")
    parser.add_argument(
        "--by",
        choices=GROUPS,
        default="",
        help="no list but sums by tenant, model, prefix or the tree of prefixes, the largest first",
    )
    parser.add_argument(
        "--prefix-blocks",
        type=positive_count,
        metavar="N",
        help="with --by prefix: count chains together whose first N blocks are equal (default: 1)",
    )
    parser.add_argument(
        "--limit",
        type=positive_count,
        default=DEFAULT_BLOCKS,
        metavar="N",
        help="list at most N blocks (default: %(default)s)",
    )


def check_block_arguments(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End the program with a one-line error if options of `kvctl blocks` do not go together."""
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


def blocks(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    return _totals(admin, arguments) if arguments.by else _list(admin, arguments)


def _chosen(arguments: argparse.Namespace) -> wire.BlocksRequest:
    return wire.BlocksRequest(
        tenant=arguments.tenant,
        tier=arguments.tier,
        key_prefix=arguments.prefix.lower(),
        model=arguments.model,
        residency=arguments.residency,
    )


def _chooses(arguments: argparse.Namespace) -> bool:
    """Return whether the options select only some of a tenant's blocks."""
    return bool(arguments.tier or arguments.prefix or arguments.model or arguments.residency)


def _list(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    reply = wire.BlocksReply()
    while len(reply.blocks) < arguments.limit:
        request = _chosen(arguments)
        request.limit = min(arguments.limit - len(reply.blocks), PAGE_BLOCKS)
        request.after, request.sort, request.reverse = reply.next, arguments.sort, arguments.reverse
        page = admin.call("Blocks", request, wire.BlocksReply)
        reply.MergeFrom(page)
        reply.next = page.next
        if not page.next or not page.blocks:
            break
    rows = [
        [
            block.key[:KEY_DIGITS], block.tenant, block.fingerprint, str(block.depth), human_bytes(block.payload_bytes),
            "+".join(block.tiers), block.state, block.durability, block.residency, human_count(block.accesses),
            human_seconds(block.idle_s), human_count(block.leases), human_count(block.children),
        ]
        for block in reply.blocks
    ]  # fmt: skip
    columns, rows = with_terms(_COLUMNS, rows, reply.blocks)
    text = render_table(columns, rows, empty="no such blocks")
    if rows and reply.total > len(rows) and (arguments.sort or not _chooses(arguments)):
        text += f"\n{human_count(len(rows))} of {human_count(reply.total)} blocks; --limit shows more"
    elif rows and reply.next:
        text += f"\nthe first {human_blocks(len(rows))} of these; --limit shows more"
    return Output(text, reply)


def with_terms(
    columns: Sequence[str], rows: Sequence[Sequence[str]], blocks: Sequence[explain.BlockStatus]
) -> tuple[list[str], list[list[str]]]:
    """Return the table of `blocks` (`columns` are its headings) with a further column for each term, such as an expiry
    or a pin, that any of the blocks has.
    """
    wider, cells_of = [list(row) for row in rows], [_terms(block) for block in blocks]
    names = [name for at, name in enumerate(_TERMS) if any(cells[at] for cells in cells_of)]
    for at in map(_TERMS.index, names):
        for row, cells in zip(wider, cells_of, strict=True):
            row.append(cells[at] or "-")
    return [*columns, *names], wider


def _terms(block: explain.BlockStatus) -> tuple[str, ...]:
    """Return what is said of some blocks only, in the order of `_TERMS`; "" where nothing is."""
    return (
        human_seconds(block.expires_in_s) if block.expires_in_s else "",
        str(block.priority or ""),
        ", ".join(block.pinned_by),
        "" if block.kind == "full" else block.kind,
        ", ".join(f"{tier} (±{error:.2g})" for tier, error in zip(block.tiers, block.errors, strict=False) if error),
    )


def _totals(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.BlockTotalsRequest(
        of=_chosen(arguments), by=arguments.by, limit=arguments.limit, prefix_blocks=arguments.prefix_blocks or 0
    )
    reply = admin.call("BlockTotals", request, wire.BlockTotalsReply)
    tiers = list(dict.fromkeys(name for total in reply.totals for name in sorted(total.tier_bytes)))
    columns = [
        *_NAMES[arguments.by], ">BLOCKS", ">SIZE", ">SHARE", *(f">{tier.upper()}" for tier in tiers), ">USES", ">IDLE",
        ">LEASES",
    ]  # fmt: skip
    rows = [
        [
            *_names(arguments.by, total, level), human_count(total.blocks), human_bytes(total.payload_bytes),
            human_share(total.payload_bytes, reply.payload_bytes),
            *(human_bytes(total.tier_bytes[tier]) for tier in tiers),
            human_count(total.accesses), human_seconds(total.idle_s), human_count(total.leases),
        ]
        for level, total in _in_order(reply.totals)
    ]  # fmt: skip
    text = render_table(columns, rows, empty="no such blocks")
    if rows:
        text += f"\n{human_blocks(reply.blocks)}, {human_bytes(reply.payload_bytes)}"
    if reply.groups > len(rows) and rows:
        text += f"; {human_count(len(rows))} of {human_count(reply.groups)} groups, --limit shows more"
    return Output(text, reply)


def _in_order(totals: Iterable[wire.BlockTotal]) -> Iterator[tuple[int, wire.BlockTotal]]:
    """Yield `totals` as they are listed, each with its level; of a tree, what continues a prefix follows it."""
    below: dict[str, list[wire.BlockTotal]] = {}
    for total in totals:
        below.setdefault(total.parent, []).append(total)
    waiting = [(0, total) for total in reversed(below.get("", []))]
    while waiting:
        level, total = waiting.pop()
        yield level, total
        if total.branches:
            waiting += [(level + 1, each) for each in reversed(below.get(total.key, []))]


def _names(by: str, total: wire.BlockTotal, level: int) -> list[str]:
    if by == "tenant":
        return [total.tenant]
    if by == "model":
        return [total.fingerprint]
    name = "  " * level + total.key[:KEY_DIGITS]
    cells = [name, total.tenant, total.fingerprint, human_count(total.longest_blocks)]
    return [*cells, human_count(total.own_blocks), total.residency] if by == "tree" else cells
