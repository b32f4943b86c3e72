"""Commands that change something: drop, flush, drain, reload, shutdown, invalidate."""

from __future__ import annotations

import argparse
import re

from kvctl.admin import AdminSocket
from kvctl.exit_codes import FAILED, OK, USAGE, CommandError
from kvctl.output import Output
from kvstore_console.units import human_blocks, human_count
from kvstore_proto.v1 import admin_pb2 as wire

MIN_FINGERPRINT_DIGITS = 8


def drop(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.DropRequest(
        tier=arguments.tier, tenant=arguments.tenant, all=arguments.all, discard=arguments.discard
    )
    reply = admin.call("Drop", request, wire.DropReply, longer_s=arguments.wait)
    place = "all tiers" if arguments.all else arguments.tier
    lines = [f"dropped {human_blocks(reply.dropped_blocks, reply.dropped_bytes)} from {place}"]
    if reply.written_back_blocks:
        lines.append(f"{human_count(reply.written_back_blocks)} of them were written to a slower tier first")
    if reply.only_copy_blocks:
        kept = f"{human_blocks(reply.only_copy_blocks, reply.only_copy_bytes)}"
        lines.append(f"kept {kept} that are only in {place}; --discard removes them")
    if others := reply.kept_blocks - reply.only_copy_blocks:
        lines.append(f"kept {human_blocks(others)} that are in use, or that a block which was kept follows")
    return Output("\n".join(lines), reply)


def flush(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.FlushRequest(timeout_ms=int(arguments.wait * 1000))
    reply = admin.call("Flush", request, wire.FlushReply, longer_s=arguments.wait)
    text = f"wrote {human_blocks(reply.written_blocks)}"
    if reply.pending_blocks:
        left = human_count(reply.pending_blocks)
        text += f"; {left} are still pending after {arguments.wait:g} s (--wait gives more)"
    return Output(text, reply, FAILED if reply.pending_blocks else OK)


def drain(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.DrainRequest(timeout_ms=int(arguments.wait * 1000), undo=arguments.undo)
    reply = admin.call("Drain", request, wire.DrainReply, longer_s=arguments.wait)
    if arguments.undo:
        return Output(f"taking clients again (state: {reply.state})", reply)
    left = reply.clients_left or reply.leases_left or reply.pending_blocks
    text = f"state: {reply.state}"
    if left:
        text += (
            f"; left after {arguments.wait:g} s: {human_count(reply.clients_left)} clients, "
            f"{human_count(reply.leases_left)} leases, {human_count(reply.pending_blocks)} blocks to write"
        )
    return Output(text, reply, FAILED if left else OK)


def reload(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    reply = admin.call("Reload", wire.ReloadRequest(), wire.ReloadReply)
    lines = [f"{each.name}: {each.before} -> {each.after}" for each in reply.applied]
    lines += [f"{each.name}: {each.before} -> {each.after} (after a restart)" for each in reply.after_restart]
    return Output("\n".join(lines) or f"no setting differs in {reply.source}", reply)


def shutdown(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    reply = admin.call("Shutdown", wire.ShutdownRequest(now=arguments.now), wire.ShutdownReply)
    after = f"\n{reply.after_stop}" if reply.after_stop else ""
    return Output(f"daemon {reply.pid} is stopping{after}", reply)


def invalidate(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    digest = arguments.fingerprint.lower().rpartition(":")[2]  # listings show MODEL:DIGEST
    if not re.fullmatch(rf"[0-9a-f]{{{MIN_FINGERPRINT_DIGITS},64}}", digest):
        raise CommandError(
            USAGE,
            f"a fingerprint is a hex digest or its first {MIN_FINGERPRINT_DIGITS} digits or more, got "
            f"{arguments.fingerprint!r}; `kvctl --json tenants` lists them",
        )
    request = wire.InvalidateRequest(fingerprint=digest, tenant=arguments.tenant)
    reply = admin.call("Invalidate", request, wire.InvalidateReply)
    if not reply.fingerprints:
        return Output(f"no stored fingerprint begins with {digest}", reply, FAILED)
    names = ", ".join(reply.fingerprints)
    text = f"removed {human_blocks(reply.blocks, reply.bytes)} of {names}"
    if reply.kept_blocks:
        text += f"; {human_count(reply.kept_blocks)} under lease go when their leases end"
    return Output(text, reply)
