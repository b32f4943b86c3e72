"""`kvctl predictor`: what prefetch by prediction was good for, tenant by tenant, and its switch; what concerns
recordings and no daemon is the program kvstored's."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvctl.admin import AdminSocket
from kvctl.exit_codes import FAILED
from kvctl.output import Output
from kvstore_console.command_line import report_error
from kvstore_console.table import render_table
from kvstore_console.units import human_bytes, human_count, human_seconds
from kvstore_proto.v1 import admin_pb2 as wire

ACTIONS = ("status", "on", "off")
OF_RECORDINGS = ("train", "evaluate")
_SWITCHES = {
    "status": wire.PredictorRequest.LEAVE, "on": wire.PredictorRequest.ON, "off": wire.PredictorRequest.OFF,
}  # fmt: skip
_HEADINGS = (
    "TENANT", "STANDING", ">PREFETCHED", ">USED", ">LATE", ">WASTED", ">WAITING", ">PRECISION", ">RECALL", ">LEAD",
    ">SPARED",
)  # fmt: skip
_JUDGED = ("used_blocks", "late_blocks", "wasted_blocks")


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
        lines.append(render_table(_HEADINGS, rows, empty=""))
    else:
        lines.append("no block was prefetched by prediction since the daemon started")
    return Output("\n".join(lines), reply)


def run_kvstored(words: Sequence[str]) -> int:
    """Let the program kvstored, of this installation or on the path, do these words; its exit status."""
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
