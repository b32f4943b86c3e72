"""`kvctl tenants`: who stores what, and the renaming of a tenant."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from kvctl.admin import AdminSocket
from kvctl.output import Output
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_share
from kvstore_proto.v1 import admin_pb2 as wire

_HEADINGS = (
    "TENANT", ">CLIENTS", ">BLOCKS", ">HOST", ">NVME", ">QUOTA", ">LIMBO", ">LOOKUPS", ">BLOCK HITS", ">MODELS",
)  # fmt: skip
Holder = wire.TenantStatus | wire.AccountStatus


def tenants(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    return _list(admin) if arguments.action == "list" else _rename(admin, arguments)


def by_bytes(accounts: Iterable[wire.AccountStatus]) -> list[wire.AccountStatus]:
    """Those that hold most first."""
    return sorted(accounts, key=lambda account: -(account.host_bytes + account.nvme_bytes))


def _list(admin: AdminSocket) -> Output:
    reply = admin.call("Tenants", wire.TenantsRequest(), wire.TenantsReply)
    rows = []
    for tenant in reply.tenants:
        quota = human_bytes(tenant.quota_bytes) if tenant.quota_bytes else "none"
        models = human_count(len(tenant.fingerprints))
        rows.append(_row(tenant.name, tenant, quota, human_bytes(tenant.limbo_bytes), models))
        rows += [_row(f"{tenant.name}/{account.name}", account) for account in by_bytes(tenant.accounts)]
    return Output(render_table(_HEADINGS, rows, empty="no tenant has connected yet"), reply)


def _row(name: str, holder: Holder, quota: str = "", limbo: str = "", models: str = "") -> list[str]:
    return [
        name, human_count(holder.clients), human_count(holder.blocks), human_bytes(holder.host_bytes),
        human_bytes(holder.nvme_bytes), quota, limbo, human_count(holder.lookups),
        human_share(holder.hit_blocks, holder.hit_blocks + holder.missed_blocks), models,
    ]  # fmt: skip


def _rename(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    old, new = arguments.names
    request = wire.RenameTenantRequest(old=old, new=new, replace=arguments.replace)
    reply = admin.call("RenameTenant", request, wire.RenameTenantReply, longer_s=arguments.wait)
    lines = [f"{new} has {human_blocks(reply.blocks, reply.bytes)} of {old}"]
    if reply.replaced_blocks:
        lines.append(f"dropped {human_blocks(reply.replaced_blocks, reply.replaced_bytes)} that {new} had before")
    if reply.clients:
        clients = "1 client has" if reply.clients == 1 else f"{human_count(reply.clients)} clients have"
        lines.append(f"{clients} to connect again, and ours do so by themselves")
    return Output("\n".join(lines), reply)
