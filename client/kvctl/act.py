"""Commands that change something: drop, flush, drain, reload, shutdown, invalidate, quarantine, predictor.

Quarantine shows keys, sizes and reasons; it never sends the bytes of a block. The program kvstored does the predictor's
work on recordings and without a daemon.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvctl.connection import AdminSocket
from kvctl.output import FAILED, KEY_DIGITS, OK, USAGE, CommandError, Output
from kvstore_console.command_line import report_error
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds, plural
from kvstore_proto.v1 import admin_pb2 as wire

MIN_FINGERPRINT_DIGITS = 8
_HEADINGS = ("PLACE", "KEY", "TENANT", ">SIZE", "STORED AGAIN", "REASON", "LOCATION")
ACTIONS = ("status", "on", "off")
OF_RECORDINGS = ("train", "evaluate")
_SWITCHES = {
    "status": wire.PredictorRequest.LEAVE, "on": wire.PredictorRequest.ON, "off": wire.PredictorRequest.OFF,
}  # fmt: skip
_PREDICTION = (
    "TENANT", "STANDING", ">PREFETCHED", ">USED", ">LATE", ">WASTED", ">WAITING", ">PRECISION", ">RECALL", ">LEAD",
    ">SPARED",
)  # fmt: skip
_JUDGED = ("used_blocks", "late_blocks", "wasted_blocks")


def drop(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.DropRequest(
        tier=arguments.tier, tenant=arguments.tenant, all=arguments.all, discard=arguments.discard, pins=arguments.pins,
        owner=arguments.owner,
    )  # fmt: skip
    reply = admin.call("Drop", request, wire.DropReply, longer_s=arguments.wait)
    if arguments.pins:
        return Output(f"unpinned {human_blocks(reply.unpinned_blocks)} of {arguments.tenant}", reply)
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
    if reply.kept_blocks:
        text += f"; {human_count(reply.kept_blocks)} stay in memory alone: NVMe is full of what was used as late"
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


def quarantine(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    return _list(admin) if arguments.action == "list" else _release(admin, arguments)


def _list(admin: AdminSocket) -> Output:
    reply = admin.call("Quarantine", wire.QuarantineRequest(), wire.QuarantineReply)
    rows = [
        [
            f"{slot.slab}:{slot.offset}", slot.key[:KEY_DIGITS] or "-", slot.tenant or "-", human_bytes(slot.bytes),
            "yes" if slot.stored_again else "no", slot.reason, slot.location,
        ]
        for slot in reply.slots
    ]  # fmt: skip
    text = render_table(_HEADINGS, rows, empty="nothing is in quarantine")
    if rows:
        text += f"\n{human_count(len(rows))} of at most {human_count(reply.limit)} slots (nvme.quarantine_slots)"
    return Output(text, reply)


def _release(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.ReleaseQuarantineRequest(locations=arguments.places, all=arguments.all)
    reply = admin.call("ReleaseQuarantine", request, wire.ReleaseQuarantineReply)
    released = f"{plural(reply.released, 'slot')} ({human_bytes(reply.released_bytes)})"
    return Output(f"released {released}: free for other blocks", reply)


def predictor(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    request = wire.PredictorRequest(switch=_SWITCHES[arguments.action])
    reply = admin.call("Predictor", request, wire.PredictorReply)
    lines = [f"predictor {reply.predictor} is {_state(reply)}"]
    if reply.enabled and not reply.failure:
        lines.append(
            f"{human_count(reply.guesses)} chains expected, {human_count(reply.planned_blocks)} blocks planned, "
            f"{human_count(reply.under_way_blocks)} under way, {human_count(reply.cancelled_blocks)} cancelled"
        )
    if reply.all.prefetched_blocks:
        rows = [_row("all", reply.all), *(_row(figures.tenant, figures) for figures in reply.tenants)]
        lines.append(render_table(_PREDICTION, rows, empty=""))
    else:
        lines.append("no block was prefetched by prediction since the daemon started")
    return Output("\n".join(lines), reply)


def run_kvstored(words: Sequence[str]) -> int:
    """Run the program kvstored with the arguments `words` and return its exit status. The program is the one of this
    installation or, if that has none, the first one on the PATH.
    """
    beside = Path(sys.executable).with_name("kvstored")
    program = str(beside) if beside.is_file() else shutil.which("kvstored")
    if program is None:
        return report_error("kvctl", f"predictor {words[1]} is done by the program kvstored, which is not here", FAILED)
    return subprocess.run([program, *words], check=False).returncode


def _state(reply: wire.PredictorReply) -> str:
    if reply.failure:
        return f"off since it failed: {reply.failure}"
    if not reply.enabled:
        return "off (prefetch.enabled; kvctl predictor on)"
    return "on"


def _row(name: str, figures: wire.PrefetchFigures) -> list[str]:
    is_judged = any(getattr(figures, field) for field in _JUDGED)
    return [
        name, figures.standing, human_bytes(figures.prefetched_bytes), human_count(figures.used_blocks),
        human_count(figures.late_blocks), human_count(figures.wasted_blocks), human_count(figures.waiting_blocks),
        f"{figures.precision:.0%}" if is_judged else "-", f"{figures.recall:.0%}" if is_judged else "-",
        human_seconds(figures.lead_s), human_seconds(figures.spared_s),
    ]  # fmt: skip
