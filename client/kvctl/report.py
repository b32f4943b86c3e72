"""kvctl report: the daemon's recent past, as one HTML page that can be mailed.

The command asks the daemon once, draws, and writes one file. The page shows names, sizes and settings, but no token
ids, keys or payload.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvctl.connection import AdminSocket
from kvctl.output import FAILED, USAGE, CommandError, Output
from kvctl.show import TIER_HEADINGS, by_bytes, tier_cells
from kvctl.snapshot import DaemonSnapshot, SampleHistory, hit_ratios, take_snapshot
from kvstore_console import axes
from kvstore_console import page as markup
from kvstore_console.history import ChartSeries, history_chart
from kvstore_console.page import charts, html_table, pairs, section
from kvstore_console.terminal import known
from kvstore_console.units import human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire

_MIN_SAMPLES = 3
_MODELS_SHOWN = 6
_REFUSED_PUTS = ("no_room_blocks", "over_quota_blocks", "declined_blocks")
_TIMED = ("lookup", "acquire", "store", "release", "prefetch")
_PACKAGES = ("kvstored", "grpcio", "protobuf", "numpy", "xxhash")
_TIERS = (*(heading.lower() for heading in TIER_HEADINGS), ">bad")
_TENANTS = (
    "tenant", "models", ">clients", ">blocks", ">host", ">nvme", ">limbo", ">lookups", ">blocks served", ">missed",
    ">hits",
)  # fmt: skip


def write_report(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    """Write an HTML page about the daemon to the file `arguments.output` or to standard output. Raises CommandError."""
    to_stdout = arguments.output == "-"
    if to_stdout and arguments.json:
        raise CommandError(USAGE, "report --json says on standard output what it did: name a file for the page")
    shot = take_snapshot(admin, since_s=0.0, settings=True)
    coarse_s = max(shot.history.resolutions_s)
    coarse = admin.call("History", wire.HistoryRequest(resolution_s=coarse_s), wire.HistoryReply)
    html = document(shot, SampleHistory(coarse)).encode()
    path = Path(arguments.output)
    if to_stdout:
        sys.stdout.buffer.write(html)
        sys.stdout.flush()
    else:
        try:
            path.write_bytes(html)
        except OSError as error:
            reason = error.strerror or error
            raise CommandError(FAILED, f"cannot write {path}: {reason}; choose another -o FILE") from None
    samples = {str(shot.history.resolution_s): len(shot.history.at_s), str(coarse_s): len(coarse.at_s)}
    counts = ", ".join(f"{count} samples of {step_s} s" for step_s, count in samples.items())
    reply = {"path": str(path.absolute()), "bytes": len(html), "samples": samples}
    return Output(f"wrote {path} ({human_bytes(len(html))}): {counts}", reply, aside=to_stdout)


def document(shot: DaemonSnapshot, coarse: SampleHistory) -> str:
    """Return an HTML page about the daemon, from the figures in `shot`. `coarse` has the samples that reach back
    furthest.
    """
    status = shot.status
    fine = shot.samples
    body = [markup.tiles(facts_of(shot))]
    body += [markup.warning(f"The daemon warns: {warning}") for warning in status.warnings]
    body.append(section(period_of(fine), charts(charts_of(fine))))
    if len(coarse) >= _MIN_SAMPLES and sum(coarse.span_s) > 1.5 * sum(fine.span_s):
        body.append(section(period_of(coarse), charts(charts_of(coarse))))
    body += [
        section("Tiers", tiers_of(shot)),
        section("Tenants", tenants_of(shot)),
        section("Misses since the start", _misses(fine)),
        section("Counters since the start", _counters(status)),
        section("Settings in use", _settings(shot.history.settings)),
        section("Versions", _versions(status)),
    ]
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    subtitle = f"{socket.gethostname()}, {now}: {status.state}, up {human_seconds(status.uptime_s)}, pid {status.pid}"
    return markup.page(f"kvstored {status.version}", subtitle, body, "Made by kvctl report. Times are local.")


def facts_of(shot: DaemonSnapshot) -> list[tuple[str, str]]:
    """Return the key figures of a daemon, each with what it says."""
    status, samples = shot.status, shot.samples
    served = status.counters.get("acquired_blocks", 0)
    requested = served + sum(samples.misses.values())
    return [
        (human_share(served, requested), f"of {human_count(requested)} requested blocks were served"),
        (human_count(status.blocks), "blocks stored"),
        *(
            (human_share(tier.used_bytes, tier.capacity_bytes), f"of {human_bytes(tier.capacity_bytes)} {tier.name}")
            for tier in shot.tiers.tiers
        ),
        (human_bytes(status.counters.get("stored_bytes", 0)), "stored by clients"),
        (human_count(status.clients), "clients now"),
    ]


def charts_of(samples: SampleHistory) -> list[str]:
    """Return HTML charts of the daemon's figures over time."""

    def draw(title: str, note: str, unit: axes.Unit, series: Sequence[ChartSeries], *, is_stacked: bool = False) -> str:
        return history_chart(title, note, unit, samples.at_s, series, is_stacked=is_stacked)

    verbs = [verb for verb in _TIMED if verb in samples.subjects("verb")]
    hits = [ChartSeries(f"from {tier}", samples.rates("tier", tier, "hits")) for tier in samples.subjects("tier")]
    misses = [
        ChartSeries(cause.replace("_", " "), samples.rates("miss", cause, "blocks"))
        for cause in samples.subjects("miss")
    ]
    refused = [
        ChartSeries(name.removesuffix("_blocks").replace("_", " "), samples.rates("daemon", "", name))
        for name in _REFUSED_PUTS
    ]
    moved = [ChartSeries("stored by clients", samples.rates("daemon", "", "stored_bytes"))]
    moved += [
        ChartSeries(f"lane {lane}", samples.rates("lane", lane, "moved_bytes")) for lane in samples.subjects("lane")
    ]
    queued = [
        ChartSeries(lane, samples.values("lane", lane, "queued"), is_peak=True) for lane in samples.subjects("lane")
    ]
    requests = [ChartSeries(verb, samples.rates("verb", verb, "requests")) for verb in verbs]
    held = [ChartSeries(name, samples.values("daemon", "", name), is_peak=True) for name in ("clients", "leases")]
    memory = [
        ChartSeries("daemon", samples.values("daemon", "", "rss_bytes")),
        ChartSeries("limbo", samples.values("daemon", "", "limbo_bytes")),
    ]
    latency = "in the daemon, by verb; log scale"
    return [
        *(
            draw(f"Occupancy of {tier}", "blocks by tenant", axes.BYTES, _occupancy(samples, tier), is_stacked=True)
            for tier in samples.subjects("tier")
        ),
        draw(
            "Hit ratio", "share of requested blocks", axes.PERCENT, [ChartSeries("blocks served", hit_ratios(samples))]
        ),
        draw("Hits by tier", "blocks a second", axes.COUNT_A_SECOND, hits, is_stacked=True),
        draw("Misses by cause", "blocks a second", axes.COUNT_A_SECOND, misses, is_stacked=True),
        draw("Puts refused", "blocks a second, by reason", axes.COUNT_A_SECOND, refused, is_stacked=True),
        draw("Movement", "by lane", axes.BYTES_A_SECOND, moved),
        draw("Waiting in lanes", "blocks queued or in flight", axes.COUNT, queued),
        draw("Requests", "by verb", axes.COUNT_A_SECOND, requests),
        draw("Latency, median", latency, axes.LATENCY, _latencies(samples, verbs, "p50_us")),
        draw("Latency, p99", latency, axes.LATENCY, _latencies(samples, verbs, "p99_us")),
        draw("Clients and leases", "", axes.COUNT, held),
        draw("Memory outside the tiers", "resident, and bytes in limbo", axes.BYTES, memory),
    ]


def _latencies(samples: SampleHistory, verbs: Sequence[str], name: str) -> list[ChartSeries]:
    return [
        ChartSeries(verb, [value / 1e6 for value in samples.values("verb", verb, name)], is_peak=name == "p99_us")
        for verb in verbs
    ]


def _occupancy(samples: SampleHistory, tier: str) -> list[ChartSeries]:
    """Return the bytes that each tenant holds in `tier`, the bytes used in all, and the capacity."""
    tenants = [
        ChartSeries(tenant, samples.values("tenant", tenant, f"{tier}_bytes")) for tenant in samples.subjects("tenant")
    ]
    return [
        *(series for series in tenants if any(known(series.values))),  # only tenants that had a block here
        ChartSeries("used in all", samples.values("tier", tier, "used_bytes"), mark="outline"),
        ChartSeries("capacity", samples.values("tier", tier, "capacity_bytes"), mark="limit"),
    ]


def period_of(samples: SampleHistory) -> str:
    """Return a heading for charts of `samples`: how far they reach back."""
    if not len(samples):
        return "Lately"
    return f"The last {human_seconds(sum(samples.span_s))}, in samples of {samples.resolution_s} s"


def tiers_of(shot: DaemonSnapshot) -> str:
    """Return an HTML table of the tiers."""
    rows = [[*tier_cells(tier), human_count(tier.quarantined_blocks)] for tier in shot.tiers.tiers]
    return html_table(_TIERS, rows)


def tenants_of(shot: DaemonSnapshot) -> str:
    """Return an HTML table of the tenants, with the accounts of each below it."""
    rows = []
    for tenant in shot.tenants.tenants:
        rows.append(_tenant_row(tenant.name, _models(tenant.fingerprints), human_bytes(tenant.limbo_bytes), tenant))
        rows += [_tenant_row(f"{tenant.name}/{each.name}", "", "", each) for each in by_bytes(tenant.accounts)]
    return html_table(_TENANTS, rows)


def _tenant_row(name: str, models: str, limbo: str, holder: wire.TenantStatus | wire.AccountStatus) -> list[str]:
    return [
        name, models, human_count(holder.clients), human_count(holder.blocks), human_bytes(holder.host_bytes),
        human_bytes(holder.nvme_bytes), limbo, human_count(holder.lookups), human_count(holder.hit_blocks),
        human_count(holder.missed_blocks), human_share(holder.hit_blocks, holder.hit_blocks + holder.missed_blocks),
    ]  # fmt: skip


def _models(names: Sequence[str]) -> str:
    """Return model names, one a line, at most `_MODELS_SHOWN` and a count of the rest."""
    more = [f"and {len(names) - _MODELS_SHOWN} more"] if len(names) > _MODELS_SHOWN else []
    return "\n".join([*names[:_MODELS_SHOWN], *more]) or "none"


def _misses(samples: SampleHistory) -> str:
    total = sum(samples.misses.values())
    rows = [
        [cause.replace("_", " "), human_count(blocks), human_share(blocks, total)]
        for cause, blocks in sorted(samples.misses.items(), key=lambda item: -item[1])
    ]
    return html_table(("cause", ">blocks", ">share"), rows)


def _counters(status: wire.StatusReply) -> str:
    facts = [(name, _shown(name, str(status.counters[name]))) for name in sorted(status.counters)]
    third = -(-len(facts) // 3)
    return pairs([("", facts[first : first + third]) for first in range(0, len(facts), third or 1)])


def _settings(settings: Mapping[str, str]) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(settings):
        name_of_section, _, name = key.rpartition(".")
        groups.setdefault(name_of_section or "general", []).append((name, _shown(name, settings[key])))
    return pairs([(f"[{name}]", facts) for name, facts in groups.items()])


def _versions(status: wire.StatusReply) -> str:
    machine = [
        ("daemon", f"{status.version}, protocol {status.protocol_version}"),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processors", str(os.cpu_count())),
    ]
    return pairs([("this machine", machine), ("packages of kvctl", [(name, _version(name)) for name in _PACKAGES])])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _shown(name: str, value: str) -> str:
    """Return a number as people read it, in the unit that `name` ends with."""
    if not value.isdecimal() or value == "0":
        return value or "-"
    if name.endswith("_bytes"):
        return human_bytes(int(value))
    return human_seconds(int(value) / 1000) if name.endswith("_ms") else human_count(int(value))
