"""`kvctl tenants`: who stores what, and the renaming of a tenant."""

from __future__ import annotations

import argparse

from kvstore_client.cli import show
from kvstore_client.cli.admin import AdminSocket
from kvstore_client.cli.output import Output
from kvstore_client.cli.units import human_blocks, human_bytes, human_count
from kvstore_proto.v1 import admin_pb2 as wire


def tenants(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    if arguments.action == "list":
        return show.tenants(admin, arguments)
    old, new = arguments.names
    request = wire.RenameTenantRequest(old=old, new=new, replace=arguments.replace)
    reply = admin.call("RenameTenant", request, wire.RenameTenantReply, longer_s=arguments.wait)
    lines = [f"{new} has {human_blocks(reply.blocks)} ({human_bytes(reply.bytes)}) of {old}"]
    if reply.replaced_blocks:
        lines.append(
            f"dropped {human_blocks(reply.replaced_blocks)} ({human_bytes(reply.replaced_bytes)}) that {new} had before"
        )
    if reply.clients:
        clients = "1 client has" if reply.clients == 1 else f"{human_count(reply.clients)} clients have"
        lines.append(f"{clients} to connect again, and ours do so by themselves")
    return Output("\n".join(lines), reply)
