"""kvctl report: what the daemon did lately, as one HTML page that can be mailed.

Asks once, draws, writes one file. Shows names, sizes and settings; token ids, keys and payload never reach it.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvstore_client.cli import report_page as page
from kvstore_client.cli import scales
from kvstore_client.cli.admin import AdminSocket
from kvstore_client.cli.charts import Chart, Curve, draw
from kvstore_client.cli.dashboard import hit_ratios
from kvstore_client.cli.exit_codes import FAILED, USAGE, CommandError
from kvstore_client.cli.output import Output
from kvstore_client.cli.past import Past, known
from kvstore_client.cli.show import by_bytes
from kvstore_client.cli.snapshot import Snapshot, take
from kvstore_client.cli.units import human_bytes, human_count, human_seconds, human_share
from kvstore_proto.v1 import admin_pb2 as wire

_MIN_SAMPLES = 3
_MODELS_SHOWN = 6
_TIMED = ("lookup", "acquire", "store", "release", "prefetch")
_PACKAGES = ("kvstored", "grpcio", "protobuf", "numpy", "xxhash")


def report(admin: AdminSocket, arguments: argparse.Namespace) -> Output:
    """Writes `arguments.output`, or to standard output. Raises CommandError."""
    to_stdout = arguments.output == "-"
    if to_stdout and arguments.json:
        raise CommandError(USAGE, "report --json says on standard output what it did: name a file for the page")
    shot = take(admin, since_s=0.0, settings=True)
    coarse_s = max(shot.history.resolutions_s)
    coarse = admin.call("History", wire.HistoryRequest(resolution_s=coarse_s), wire.HistoryReply)
    html = document(shot, Past(coarse)).encode()
    path = Path(arguments.output)
    if to_stdout:
        sys.stdout.buffer.write(html)
        sys.stdout.flush()
    else:
        try:
            path.write_bytes(html)
        except OSError as error:
            raise CommandError(
                FAILED, f"cannot write {path}: {error.strerror or error}; choose another -o FILE"
            ) from None
    samples = {str(shot.history.resolution_s): len(shot.history.at_s), str(coarse_s): len(coarse.at_s)}
    said = f"wrote {path} ({human_bytes(len(html))}): " + ", ".join(f"{n} samples of {s} s" for s, n in samples.items())
    return Output(said, {"path": str(path.absolute()), "bytes": len(html), "samples": samples}, aside=to_stdout)


def document(shot: Snapshot, coarse: Past) -> str:
    """The page. `coarse` are the samples that go back furthest."""
    status = shot.status
    fine = shot.past
    body = [page.tiles(_facts(shot))]
    body += [page.warning(f"The daemon warns: {warning}") for warning in status.warnings]
    body.append(page.charts(_period(fine), [draw(chart) for chart in _charts(fine)]))
    if len(coarse) >= _MIN_SAMPLES and sum(coarse.span_s) > 1.5 * sum(fine.span_s):
        body.append(page.charts(_period(coarse), [draw(chart) for chart in _charts(coarse)]))
    body += [_tiers(shot), _tenants(shot), _misses(fine), _counters(status), _settings(shot.history.settings)]
    body.append(_versions(status))
    now = time.strftime("%Y-%m-%d %H:%M:%S %Z")
    subtitle = f"{socket.gethostname()}, {now}: {status.state}, up {human_seconds(status.uptime_s)}, pid {status.pid}"
    return page.page(f"kvstored {status.version}", subtitle, body, "Made by kvctl report. Times are local.")


def _facts(shot: Snapshot) -> list[tuple[str, str]]:
    status, past = shot.status, shot.past
    served = status.counters.get("acquired_blocks", 0)
    missed = sum(past.misses.values())
    facts = [
        (human_share(served, served + missed), f"of {human_count(served + missed)} blocks asked for were served"),
        (human_count(status.blocks), "blocks stored"),
    ]
    facts += [
        (human_share(tier.used_bytes, tier.capacity_bytes), f"of {human_bytes(tier.capacity_bytes)} {tier.name} used")
        for tier in shot.tiers.tiers
    ]
    facts.append((human_bytes(status.counters.get("stored_bytes", 0)), "stored by clients"))
    facts.append((human_count(status.clients), "clients now"))
    return facts


def _charts(past: Past) -> list[Chart]:
    at_s = past.at_s
    charts = [_occupancy(past, tier) for tier in past.subjects("tier")]
    charts.append(Chart("Hit ratio", scales.SHARE, at_s, [Curve("blocks served", _percent(hit_ratios(past)))],
                        note="blocks served, of those asked for"))  # fmt: skip
    hits = [Curve(f"from {tier}", past.rates("tier", tier, "hits")) for tier in past.subjects("tier")]
    charts.append(Chart("Hits by tier", scales.BLOCKS_A_SECOND, at_s, hits, is_stacked=True, note="blocks a second"))
    misses = [Curve(cause.replace("_", " "), past.rates("miss", cause, "blocks")) for cause in past.subjects("miss")]
    charts.append(
        Chart("Misses by cause", scales.BLOCKS_A_SECOND, at_s, misses, is_stacked=True, note="blocks a second")
    )
    moved = [Curve("stored by clients", past.rates("daemon", "", "stored_bytes"))]
    moved += [Curve(f"lane {lane}", past.rates("lane", lane, "moved_bytes")) for lane in past.subjects("lane")]
    charts.append(Chart("Movement", scales.BYTES_A_SECOND, at_s, moved, note="by lane"))
    queued = [Curve(lane, past.values("lane", lane, "queued"), is_peak=True) for lane in past.subjects("lane")]
    charts.append(Chart("Waiting in lanes", scales.COUNT, at_s, queued, note="blocks queued or in flight"))
    verbs = [verb for verb in _TIMED if verb in past.subjects("verb")]
    asked = [Curve(verb, past.rates("verb", verb, "requests")) for verb in verbs]
    charts.append(Chart("Requests", scales.REQUESTS_A_SECOND, at_s, asked, note="by verb"))
    for name, title in (("p50_us", "Latency, median"), ("p99_us", "Latency, p99")):
        curves = [Curve(verb, past.values("verb", verb, name), is_peak=name == "p99_us") for verb in verbs]
        charts.append(Chart(title, scales.LATENCY, at_s, curves, note="in the daemon, by verb; log scale"))
    held = [Curve(name, past.values("daemon", "", name), is_peak=True) for name in ("clients", "leases")]
    charts.append(Chart("Clients and leases", scales.COUNT, at_s, held))
    memory = [Curve("daemon", past.values("daemon", "", "rss_bytes"))]
    memory.append(Curve("limbo", past.values("daemon", "", "limbo_bytes")))
    charts.append(Chart("Memory beside the tiers", scales.BYTES, at_s, memory, note="resident, and bytes in limbo"))
    return charts


def _occupancy(past: Past, tier: str) -> Chart:
    """What tenants hold, under what the tier uses in all and may use."""
    curves = [Curve(tenant, past.values("tenant", tenant, f"{tier}_bytes")) for tenant in past.subjects("tenant")]
    curves = [curve for curve in curves if any(known(curve.values))]  # tenants without a block here are no news
    used = past.values("tier", tier, "used_bytes")
    curves.append(Curve("used in all", used, mark="outline"))
    curves.append(Curve("capacity", past.values("tier", tier, "capacity_bytes"), mark="limit"))
    return Chart(f"Occupancy of {tier}", scales.BYTES, past.at_s, curves, is_stacked=True, note="blocks by tenant")


def _period(past: Past) -> str:
    if not len(past):
        return "Lately"
    return f"The last {human_seconds(sum(past.span_s))}, in samples of {past.resolution_s} s"


def _percent(shares: Sequence[float]) -> list[float]:
    return [100 * share for share in shares]


def _tiers(shot: Snapshot) -> str:
    headings = ["tier", "state", "used", "capacity", "full", "blocks", "hits", "read", "written", "evicted", "bad"]
    rows = [
        [
            tier.name, tier.state, human_bytes(tier.used_bytes), human_bytes(tier.capacity_bytes),
            human_share(tier.used_bytes, tier.capacity_bytes), human_count(tier.blocks), human_count(tier.hits),
            human_bytes(tier.bytes_read), human_bytes(tier.bytes_written), human_count(tier.evicted_blocks),
            human_count(tier.quarantined_blocks),
        ]
        for tier in shot.tiers.tiers
    ]  # fmt: skip
    return page.table("Tiers", headings, rows, words=2)


def _tenants(shot: Snapshot) -> str:
    headings = [
        "tenant",
        "models",
        "clients",
        "blocks",
        "host",
        "nvme",
        "limbo",
        "lookups",
        "blocks served",
        "missed",
        "hits",
    ]
    rows = []
    for tenant in shot.tenants.tenants:
        rows.append(_tenant_row(tenant.name, _models(tenant.fingerprints), human_bytes(tenant.limbo_bytes), tenant))
        rows += [_tenant_row(f"{tenant.name}/{each.name}", "", "", each) for each in by_bytes(tenant.accounts)]
    return page.table("Tenants", headings, rows, words=2)


def _tenant_row(name: str, models: str, limbo: str, holder: wire.TenantStatus | wire.AccountStatus) -> list[str]:
    return [
        name, models, human_count(holder.clients), human_count(holder.blocks), human_bytes(holder.host_bytes),
        human_bytes(holder.nvme_bytes), limbo, human_count(holder.lookups), human_count(holder.hit_blocks),
        human_count(holder.missed_blocks), human_share(holder.hit_blocks, holder.hit_blocks + holder.missed_blocks),
    ]  # fmt: skip


def _models(names: Sequence[str]) -> str:
    """One a line, and no more than a reader would look at."""
    more = [f"and {len(names) - _MODELS_SHOWN} more"] if len(names) > _MODELS_SHOWN else []
    return "\n".join([*names[:_MODELS_SHOWN], *more]) or "none"


def _misses(past: Past) -> str:
    total = sum(past.misses.values())
    rows = [
        [cause.replace("_", " "), human_count(blocks), human_share(blocks, total)]
        for cause, blocks in sorted(past.misses.items(), key=lambda item: -item[1])
    ]
    return page.table("Misses since the start", ["cause", "blocks", "share"], rows)


def _counters(status: wire.StatusReply) -> str:
    facts = [(name, _shown(name, str(status.counters[name]))) for name in sorted(status.counters)]
    third = -(-len(facts) // 3)
    groups = [("", facts[number * third : (number + 1) * third]) for number in range(3)]
    return page.pairs("Counters since the start", [(name, part) for name, part in groups if part])


def _settings(settings: Mapping[str, str]) -> str:
    groups: dict[str, list[tuple[str, str]]] = {}
    for key in sorted(settings):
        section, _, name = key.rpartition(".")
        groups.setdefault(section or "general", []).append((name, _shown(name, settings[key])))
    return page.pairs("Settings in use", [(f"[{section}]", facts) for section, facts in groups.items()])


def _versions(status: wire.StatusReply) -> str:
    here = [(name, _version(name)) for name in _PACKAGES]
    machine = [
        ("daemon", f"{status.version}, protocol {status.protocol_version}"),
        ("Python", platform.python_version()),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
        ("processors", str(os.cpu_count())),
    ]
    return page.pairs("Versions", [("this machine", machine), ("packages of kvctl", here)])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


_WRITTEN: Sequence[tuple[str, Callable[[int], str]]] = (
    ("_bytes", lambda value: human_bytes(value)),
    ("_ms", lambda value: human_seconds(value / 1000)),
)


def _shown(name: str, value: str) -> str:
    """A number as people read it, by the unit in its name."""
    if value.isdecimal():
        if value == "0":
            return "0"
        for ending, write in _WRITTEN:
            if name.endswith(ending):
                return write(int(value))
        return human_count(int(value))
    return value or "-"
