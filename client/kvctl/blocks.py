"""kvctl blocks: stored blocks one by one, or their sums by tenant, model or prefix."""

from __future__ import annotations

import argparse

from kvctl.admin import AdminSocket
from kvctl.block_arguments import PAGE_BLOCKS
from kvctl.output import Output
from kvctl.show import KEY_DIGITS
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire

_COLUMNS = (
    "KEY", "TENANT", "MODEL", ">DEPTH", ">SIZE", "TIERS", "STATE", "DURABILITY", "CLASS", ">USES", ">IDLE", ">LEASES",
    ">CHILDREN",
)  # fmt: skip
_NAMES = {"tenant": ("TENANT",), "model": ("MODEL",), "prefix": ("PREFIX", "TENANT", "MODEL", ">LONGEST")}


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
    """Whether only some of a tenant's blocks are listed."""
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
    text = render_table(_COLUMNS, rows, empty="no such blocks")
    if rows and reply.total > len(rows) and (arguments.sort or not _chooses(arguments)):
        text += f"\n{human_count(len(rows))} of {human_count(reply.total)} blocks; --limit shows more"
    elif rows and reply.next:
        text += f"\nthe first {human_blocks(len(rows))} of these; --limit shows more"
    return Output(text, reply)


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
            *_names(arguments.by, total), human_count(total.blocks), human_bytes(total.payload_bytes),
            human_share(total.payload_bytes, reply.payload_bytes),
            *(human_bytes(total.tier_bytes[tier]) for tier in tiers),
            human_count(total.accesses), human_seconds(total.idle_s), human_count(total.leases),
        ]
        for total in reply.totals
    ]  # fmt: skip
    text = render_table(columns, rows, empty="no such blocks")
    if rows:
        text += f"\n{human_blocks(reply.blocks)}, {human_bytes(reply.payload_bytes)}"
    if reply.groups > len(rows) and rows:
        text += f"; {human_count(len(rows))} of {human_count(reply.groups)} groups, --limit shows more"
    return Output(text, reply)


def _names(by: str, total: wire.BlockTotal) -> list[str]:
    if by == "tenant":
        return [total.tenant]
    if by == "model":
        return [total.fingerprint]
    return [total.key[:KEY_DIGITS], total.tenant, total.fingerprint, human_count(total.longest_blocks)]
