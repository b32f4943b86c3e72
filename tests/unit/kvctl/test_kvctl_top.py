"""The live view: a pure function of replies that fits its screen, and a terminal that is given back."""

from __future__ import annotations

import io
import math
import re
from typing import Any

import pytest

from kvctl.dashboard import render
from kvctl.snapshot import DaemonSnapshot, SampleHistory, hit_ratios, without_nan
from kvstore_console.terminal import Line, bar, is_terminal, size_of, sparkline, wants_colour
from kvstore_proto.v1 import admin_pb2 as pb

SECONDS = 60
NAN = math.nan


def series(scope: str, subject: str, name: str, values: list[float], *, is_flow: bool = True) -> pb.HistorySeries:
    return pb.HistorySeries(scope=scope, subject=subject, name=name, values=values, is_flow=is_flow)


def history(*more: pb.HistorySeries) -> pb.HistoryReply:
    """A minute: 8 blocks served and 2 missed in every second."""
    known = [
        series("daemon", "", "acquired_blocks", [8.0] * SECONDS),
        series("miss", "never_stored", "blocks", [2.0] * SECONDS),
        series("miss", "evicted", "blocks", [0.0] * SECONDS),
        series("tier", "host", "hits", [8.0] * SECONDS),
        series("tier", "host", "read_bytes", [float(3 << 20)] * SECONDS),
        series("lane", "nvme→host", "moved_bytes", [float(5 << 20)] * SECONDS),
        series("verb", "acquire", "requests", [4.0] * SECONDS),
        series("verb", "acquire", "p50_us", [50.0] * SECONDS, is_flow=False),
        series("verb", "acquire", "p99_us", [NAN] * (SECONDS - 1) + [12_000.0], is_flow=False),
        series("tenant", "chat", "hit_blocks", [8.0] * SECONDS),
        series("tenant", "chat", "missed_blocks", [2.0] * SECONDS),
    ]
    return pb.HistoryReply(
        resolution_s=1,
        at_s=[1e9 + second for second in range(SECONDS)],
        span_s=[1.0] * SECONDS,
        series=[*known, *more],
        misses={"never_stored": 100, "evicted": 0},
    )


def snapshot(**changes: Any) -> DaemonSnapshot:
    parts: dict[str, Any] = {
        "status": pb.StatusReply(
            version="9.9", state="serving", pid=4242, uptime_s=7384, clients=2, blocks=1234567, leases=1,
            rss_bytes=64 << 20, counters={"acquired_blocks": 300},
            lanes=[pb.LaneStatus(name="nvme→host", queued=3, in_flight=1, moved_bytes=7 << 30, refused=2)],
        ),
        "tiers": pb.TiersReply(
            tiers=[
                pb.TierStatus(name="host", state="ok", used_bytes=1 << 30, capacity_bytes=4 << 30),
                pb.TierStatus(name="nvme", state="read-only", used_bytes=8 << 30, capacity_bytes=8 << 30),
            ]
        ),
        "tenants": pb.TenantsReply(
            tenants=[
                pb.TenantStatus(name="small", host_bytes=1),
                pb.TenantStatus(
                    name="chat", clients=2, blocks=999, host_bytes=1 << 30, hit_blocks=3, missed_blocks=1
                ),
            ]
        ),
        "history": history(),
    }  # fmt: skip
    return DaemonSnapshot(**(parts | changes))


def shown(shot: DaemonSnapshot, width: int = 80, height: int = 0) -> list[str]:
    return [line.render(width, colour=False) for line in render(shot, width=width, height=height, clock="12:34:56")]


def line_of(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_eighty_columns_hold_all_of_it() -> None:
    lines = shown(snapshot())
    assert all(len(line) <= 80 for line in lines), max(lines, key=len)
    assert lines[0].startswith("kvstored 9.9  serving  up 2 h 3 min  pid 4242") and lines[0].endswith("12:34:56")
    assert " ".join(lines[1].split()) == "2 clients 1,234,567 blocks 1 lease 0 B in limbo 64.0 MiB resident"
    assert re.fullmatch(r"host  █+▌ +25% of +4.0 GiB +8.0 +3.0 MiB +0", line_of(lines, "host"))
    assert "100% of    8.0 GiB" in line_of(lines, "nvme ") and "      is read-only" in lines
    assert "80.0%  80 of 100 blocks" in line_of(lines, "last 10 s")
    assert "75.0%  300 of 400 blocks" in line_of(lines, "in all")
    assert line_of(lines, "missed for").split(maxsplit=2)[2] == "never stored 20"
    assert line_of(lines, "nvme→host").split()[1:6] == ["4", "5.0", "MiB/s", "7.0", "GiB"]
    assert line_of(lines, "acquire").split()[1:8] == ["4.0", "50", "µs", "12", "ms", "12", "ms"]
    assert line_of(lines, "acquire").endswith("  " + "█" * 27)
    assert line_of(lines, "chat").split()[-2:] == ["75%", "80%"]


def test_the_largest_tenant_comes_first() -> None:
    lines = shown(snapshot())
    assert lines.index(line_of(lines, "chat")) < lines.index(line_of(lines, "small"))


def test_a_daemon_that_has_just_started_is_no_trouble() -> None:
    empty = DaemonSnapshot(
        pb.StatusReply(version="9.9", state="starting"), pb.TiersReply(), pb.TenantsReply(), pb.HistoryReply()
    )
    lines = shown(empty)
    assert "no block was requested" in line_of(lines, "last 10 s")
    assert all(len(line) <= 80 for line in lines)


@pytest.mark.parametrize("width", [1, 60, 79, 80, 81, 132, 300])
def test_no_line_is_wider_than_the_screen(width: int) -> None:
    assert all(len(line) <= width for line in shown(snapshot(), width))


def test_lines_that_do_not_fit_are_counted() -> None:
    whole = shown(snapshot())
    cut = shown(snapshot(), height=10)
    assert len(cut) == 10
    assert cut[-1] == f"... {len([line for line in whole if line]) - 9} more lines: make the window taller"
    assert shown(snapshot(), height=len(whole)) == whole


def test_colour_changes_no_width() -> None:
    for line in render(snapshot(), width=80, height=0, clock=""):
        coloured = line.render(80, colour=True)
        assert re.sub(r"\x1b\[[0-9;]*m", "", coloured).rstrip() == line.render(80, colour=False)
        assert coloured.count("\x1b[0m") * 2 == coloured.count("\x1b[")
    assert Line().add("abc", "red").add("def").render(4, colour=True) == "\x1b[31mabc\x1b[0md"


def test_warnings_of_the_daemon_are_shown() -> None:
    status = pb.StatusReply(version="9.9", state="serving", warnings=["no direct I/O"])
    assert "warning: no direct I/O" in shown(snapshot(status=status))


def test_bars_and_sparklines() -> None:
    assert (bar(0, 4), bar(0.5, 4), bar(1.0, 4), bar(7.0, 4)) == ("    ", "██  ", "████", "████")
    assert bar(1e-6, 4) == "▏   ", "the least that is not nothing is seen"
    assert sparkline([0, 1, 2, 4, 8], 5) == "▁▂▂▄█"
    assert sparkline([1, NAN, 1], 5) == "  █ █"
    assert sparkline([0.5], 1, top=1.0) == "▄"
    assert sparkline([1, 2, 3], 0) == ""
    assert sparkline([], 3) == "   "
    assert sparkline([1] * 30 + [NAN, 2] * 15, 10) == "▄▄▄▄▄█████", "all of the time, in the room there is"


def test_the_past_is_asked_by_seconds_not_by_samples() -> None:
    reply = pb.HistoryReply(
        at_s=[100, 101, 140], span_s=[1, 1, 39], series=[series("daemon", "", "lookups", [5.0, 5.0, 78.0])]
    )
    samples = SampleHistory(reply)
    assert samples.lately("daemon", "", "lookups", 10) == 78
    assert samples.rate_lately("daemon", "", "lookups", 10) == 2
    assert samples.lately("daemon", "", "lookups", 39.5) == 83
    assert samples.rates("daemon", "", "lookups") == [5, 5, 2]
    assert samples.lately("daemon", "", "unknown", 10) == 0
    assert math.isnan(samples.worst_lately("verb", "get", "p99_us", 10))


def test_a_second_without_requests_has_no_ratio() -> None:
    reply = history()
    reply.series[0].values[5] = 0.0
    reply.series[1].values[5] = 0.0
    ratios = hit_ratios(SampleHistory(reply))
    assert ratios[4] == pytest.approx(0.8) and math.isnan(ratios[5])


def test_json_has_null_where_nothing_is_known() -> None:
    document = snapshot().document()
    assert set(document) == {"status", "tiers", "tenants", "history"}
    p99 = next(item for item in document["history"]["series"] if item["name"] == "p99_us")
    assert p99["values"][0] is None and p99["values"][-1] == 12_000
    assert without_nan([NAN, {"a": NAN}]) == [None, {"a": None}]


def test_colour_needs_a_terminal_and_consent(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert is_terminal(Terminal()) and wants_colour(Terminal())
    assert not wants_colour(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert is_terminal(Terminal()) and not wants_colour(Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert not is_terminal(Terminal())
    assert size_of(io.StringIO()) == (80, 24)


def test_a_terminal_of_24_lines_shows_tenants_and_requests() -> None:
    verbs = [
        series("verb", verb, "requests", [1.0] * SECONDS) for verb in ("lookup", "release", "store", "lend", "ping")
    ]
    tenants = pb.TenantsReply(tenants=[pb.TenantStatus(name=f"tenant-{n}", host_bytes=n) for n in range(9)])
    lines = shown(snapshot(history=history(*verbs), tenants=tenants), height=24)
    assert len(lines) == 24
    assert line_of(lines, "TENANT") and line_of(lines, "tenant-8")
    assert line_of(lines, "REQUEST") and line_of(lines, "lookup") and line_of(lines, "acquire")
    assert lines[-1] == "... 6 more lines: make the window taller"
    quiet = shown(snapshot(history=history(*verbs)), height=24)
    assert line_of(quiet, "ping") and line_of(quiet, "small"), "empty lines go before anything that is said"
