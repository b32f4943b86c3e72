"""The screen of `kvctl top`, as lines: a pure function of a snapshot, a size and the time of day.

It never talks to a daemon or a terminal. Invariant: no line is wider than the screen and there are no more lines than
fit; if some do not fit, the last line says how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvctl.show import budget_line, by_bytes
from kvctl.snapshot import DaemonSnapshot, SampleHistory, hit_ratios
from kvstore_console.terminal import Line, bar, plain_line, sparkline
from kvstore_console.units import human_bytes, human_count, human_seconds
from kvstore_proto.v1 import admin_pb2 as wire

MIN_WIDTH = 60
LATELY_S = 10.0
MINUTE_S = 60.0
NOW_S = 3.0  # rates: one second alone flickers
_LEAST_ROWS = 3  # of a table: its heading, one row, and how many more there are
_ORDER = ("lookup", "acquire", "release", "store", "prefetch", "touch", "ping")
_STATES = {"serving": "green", "ok": "green", "draining": "yellow", "full": "yellow", "shrunk": "yellow"}


def render(shot: DaemonSnapshot, *, width: int, height: int, clock: str, note: str = "") -> list[Line]:
    """Return the lines of the whole screen of `kvctl top`, which shows the figures of `shot`. `width` and `height` are
    the terminal's size in characters; a `height` of 0 means as many lines as needed. `clock` is the time as text, and
    `note` a message for the user.
    """
    width = max(width, MIN_WIDTH)
    samples = shot.samples
    above = [_head(shot, width, clock, note), _tiers(shot, samples, width), _hits(shot, samples, width)]
    above.append(_lanes(shot, samples, width))
    verbs, tenants = _verbs(samples, width), _tenants(shot, samples, width)
    warnings = [plain_line(f"warning: {warning}", "yellow") for warning in shot.status.warnings]
    lines = _joined([*above, verbs, tenants, warnings], plain_line(""))
    if not height or len(lines) <= height:
        return lines
    # Empty lines go first, then requests and tenants share what the rest leaves: neither hides the other.
    room = height - sum(map(len, (*above, warnings)))
    if room >= 2 * _LEAST_ROWS:
        for_tenants = min(len(tenants), max(room // 2, room - len(verbs)))
        verbs, tenants = _cut_rows(verbs, room - for_tenants), _cut_rows(tenants, for_tenants)
    return _cut_rows(_joined([*above, verbs, tenants, warnings]), height)


def _joined(parts: Sequence[Sequence[Line]], *between: Line) -> list[Line]:
    lines: list[Line] = []
    for part in parts:
        if part:
            lines += [*(between if lines else ()), *part]
    return lines


def _cut_rows(lines: list[Line], room: int) -> list[Line]:
    """Return at most `room` of the lines; the last one says how many are not shown."""
    if len(lines) <= room:
        return lines
    hidden = plain_line(f"... {len(lines) - room + 1} more lines: make the window taller", "dim")
    return [*lines[: room - 1], hidden]


def _head(shot: DaemonSnapshot, width: int, clock: str, note: str) -> list[Line]:
    status = shot.status
    first = Line().add("kvstored ", "bold").add(status.version, "bold").add("  ")
    first.add(status.state, _STATES.get(status.state, "red"))
    first.add(f"  up {human_seconds(status.uptime_s)}  pid {status.pid}")
    right = f"{clock}  {note}".rstrip()
    first.add(" " * max(2, width - first.width - len(right))).add(right, "dim")
    second = Line()
    for number, what in (
        (human_count(status.clients), "client" if status.clients == 1 else "clients"),
        (human_count(status.blocks), "block" if status.blocks == 1 else "blocks"),
        (human_count(status.leases), "lease" if status.leases == 1 else "leases"),
        (human_bytes(status.limbo_bytes), "in limbo"),
        (human_bytes(status.rss_bytes), "resident"),
    ):
        second.add(number, "bold").add(f" {what}   ", "dim")
    return [first, second]


def _tiers(shot: DaemonSnapshot, samples: SampleHistory, width: int) -> list[Line]:
    bar_width = width - 54
    heading = f"{'TIER':6}{'OCCUPANCY':{bar_width + 21}}{'HITS/s':>7}{'READ/s':>10}{'WRITE/s':>10}"
    lines = [plain_line(heading, "dim")]
    for tier in shot.tiers.tiers:
        share = tier.used_bytes / tier.capacity_bytes if tier.capacity_bytes else 0.0
        line = (
            Line()
            .add(f"{tier.name:6}", "bold")
            .add(bar(share, bar_width), "blue" if tier.state in ("ok", "") else "red")
        )
        line.add(f"{share:5.0%} of {human_bytes(tier.capacity_bytes):>10}  ")
        line.add(f"{_rate(samples, 'tier', tier.name, 'hits'):>7}")
        for name in ("read_bytes", "written_bytes"):
            line.add(f"{_short_bytes(samples.rate_lately('tier', tier.name, name, NOW_S)):>10}")
        lines.append(line)
        if tier.state not in ("ok", ""):
            lines.append(plain_line(f"      is {tier.state}", _STATES.get(tier.state, "red")))
    budget = budget_line(shot.status)
    if budget:
        lines.append(Line().add("writes ", "dim").add(_cut(budget, width - 7), _budget_style(shot)))
    return lines


def _budget_style(shot: DaemonSnapshot) -> str:
    budget = shot.status.endurance
    if not budget.bytes_per_day:
        return "dim"
    return "yellow" if budget.scarce else ""


def _hits(shot: DaemonSnapshot, samples: SampleHistory, width: int) -> list[Line]:
    causes = samples.subjects("miss")
    lately = samples.lately("daemon", "", "acquired_blocks", LATELY_S)
    missed = {cause: samples.lately("miss", cause, "blocks", LATELY_S) for cause in causes}
    lines = [plain_line("HITS", "dim")]
    lines.append(_ratio("last 10 s", lately, sum(missed.values()), width))
    total = shot.status.counters.get("acquired_blocks", 0)
    lines.append(_ratio("in all", total, sum(samples.misses.values()), width))
    lines.append(Line().add(f"{'a minute':11}", "dim").add(sparkline(hit_ratios(samples), width - 11, top=1.0), "cyan"))
    why = [f"{cause.replace('_', ' ')} {human_count(round(count))}" for cause, count in missed.items() if count]
    lines.append(Line().add(f"{'missed for':11}", "dim").add(", ".join(why) or "nothing in the last 10 s"))
    return lines


def _ratio(label: str, served: float, missed: float, width: int) -> Line:
    line = Line().add(f"{label:11}", "dim")
    asked = served + missed
    if not asked:
        return line.add("no block was requested")
    share = served / asked
    style = "green" if share >= 0.8 else "yellow" if share >= 0.4 else "red"
    line.add(bar(share, max(10, width - 54)), style).add(f"{share:6.1%}", "bold")
    return line.add(f"  {human_count(round(served))} of {human_count(round(asked))} blocks")


def _lanes(shot: DaemonSnapshot, samples: SampleHistory, width: int) -> list[Line]:
    if not shot.status.lanes:
        return []
    lines = [plain_line(f"{'LANE':12}{'QUEUED':>7}{'NOW':>12}{'MOVED':>11}{'REFUSED':>9}  A MINUTE", "dim")]
    for lane in shot.status.lanes:
        waiting = lane.queued + lane.in_flight
        line = Line().add(f"{lane.name:12}", "bold").add(f"{human_count(waiting):>7}", "yellow" if waiting else "")
        line.add(f"{_short_bytes(samples.rate_lately('lane', lane.name, 'moved_bytes', NOW_S)) + '/s':>12}")
        line.add(f"{human_bytes(lane.moved_bytes):>11}")
        line.add(f"{human_count(lane.refused):>9}", "red" if lane.refused else "").add("  ")
        lines.append(line.add(sparkline(samples.rates("lane", lane.name, "moved_bytes"), width - 53), "cyan"))
    return lines


def _verbs(samples: SampleHistory, width: int) -> list[Line]:
    verbs = sorted(samples.subjects("verb"), key=lambda verb: _ORDER.index(verb) if verb in _ORDER else len(_ORDER))
    lines = [plain_line(f"{'REQUEST':12}{'A SECOND':>9}{'P50':>10}{'P99':>11}{'WORST':>9}  A MINUTE", "dim")]
    for verb in verbs:
        line = Line().add(f"{verb:12}", "bold").add(f"{_rate(samples, 'verb', verb, 'requests'):>9}")
        line.add(f"{_time(samples.middle_lately('verb', verb, 'p50_us', LATELY_S)):>10}")
        line.add(f"{_time(samples.worst_lately('verb', verb, 'p99_us', LATELY_S)):>11}")
        line.add(f"{_time(samples.worst_lately('verb', verb, 'p99_us', MINUTE_S)):>9}").add("  ")
        lines.append(line.add(sparkline(samples.rates("verb", verb, "requests"), width - 53), "cyan"))
    return lines if verbs else []


def _tenants(shot: DaemonSnapshot, samples: SampleHistory, width: int) -> list[Line]:
    tenants = sorted(shot.tenants.tenants, key=lambda tenant: -(tenant.host_bytes + tenant.nvme_bytes))
    name_width = max(12, width - 68)
    heading = f"{'TENANT':{name_width}}{'CLIENTS':>8}{'BLOCKS':>11}{'HOST':>11}{'NVME':>11}{'HITS':>7}{'LAST 10 s':>11}"
    lines = [plain_line(heading, "dim")]
    for tenant in tenants:
        line = _holder(tenant.name, tenant, name_width, "bold")
        recent = [samples.lately("tenant", tenant.name, name, LATELY_S) for name in ("hit_blocks", "missed_blocks")]
        lines.append(line.add(f"{_share(*recent):>11}"))
        lines += [_holder(f" /{account.name}", account, name_width, "") for account in by_bytes(tenant.accounts)]
    return lines if tenants else []


def _holder(name: str, holder: wire.TenantStatus | wire.AccountStatus, name_width: int, style: str) -> Line:
    line = Line().add(f"{_cut(name, name_width - 1):{name_width}}", style)
    line.add(f"{human_count(holder.clients):>8}{human_count(holder.blocks):>11}")
    line.add(f"{human_bytes(holder.host_bytes):>11}{human_bytes(holder.nvme_bytes):>11}")
    return line.add(f"{_share(holder.hit_blocks, holder.missed_blocks):>7}")


def _rate(samples: SampleHistory, scope: str, subject: str, name: str) -> str:
    rate = samples.rate_lately(scope, subject, name, NOW_S)
    return f"{rate:.1f}" if 0 < rate < 10 else human_count(round(rate))


def _short_bytes(rate: float) -> str:
    return human_bytes(round(rate)) if rate >= 1 else "0"


def _time(microseconds: float) -> str:
    return "-" if math.isnan(microseconds) else human_seconds(microseconds / 1e6)


def _share(served: float, missed: float) -> str:
    return f"{served / (served + missed):.0%}" if served + missed else "-"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
