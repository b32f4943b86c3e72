"""kvctl doctor: runs the checks area by area and shows what they found, with the daemon running or not."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvctl.connection import AdminSocket
from kvctl.doctor import disk, limits, machine, serving, sockets, surroundings, tiers
from kvctl.doctor.surroundings import Check, Finding, Level, Surroundings, fail, guarded, ok
from kvctl.output import FAILED, OK, CommandError, Output
from kvstore_console.progress import Progress
from kvstore_console.terminal import Line, is_terminal, size_of, wants_colour
from kvstore_proto.v1 import admin_pb2 as wire

_STYLES = {Level.OK: "green", Level.WARN: "yellow", Level.FAIL: "red"}
Areas = list[tuple[str, list[Finding]]]


def doctor(directory: Path, arguments: argparse.Namespace) -> Output:
    """Run every check of `kvctl doctor` and return the findings. The exit code is FAILED if a check failed, and OK if
    there are only warnings.
    """
    clock = machine.ClockWatch()
    around, trouble = look_around(directory, arguments)
    with Progress("kvctl doctor") as progress:
        checked = _checks(around, trouble, clock, arguments, progress)
        areas: Areas = [(area, list(_findings(checks))) for area, checks in checked]
    findings = [finding for _, found in areas for finding in found]
    failed = any(finding.level is Level.FAIL for finding in findings)
    return Output(render(areas, size_of(sys.stdout)[0]), document(areas), FAILED if failed else OK, painted=True)


def look_around(directory: Path, arguments: argparse.Namespace) -> tuple[Surroundings, CommandError | None]:
    """Return the inputs of the doctor's checks, and the error if the daemon did not answer on its admin socket, or None
    if it answered.
    """
    status: wire.StatusReply | None = None
    try:
        with AdminSocket(directory, arguments.timeout) as admin:
            status = admin.call("Status", wire.StatusRequest(), wire.StatusReply)
            history = admin.call("History", wire.HistoryRequest(since_s=1e-3, settings=True), wire.HistoryReply)
    except CommandError as error:  # with a status: a daemon that is older than this command
        config = None if arguments.config is None else Path(arguments.config)
        return Surroundings(directory, surroundings.of_file(config, arguments.state_dir), status), error
    return Surroundings(directory, surroundings.of_daemon(history.settings), status), None


def _checks(
    around: Surroundings,
    trouble: CommandError | None,
    clock: machine.ClockWatch,
    arguments: argparse.Namespace,
    progress: Progress,
) -> Iterator[tuple[str, list[tuple[str, Check]]]]:
    """Yield each area with its checks, in the order in which things go wrong. A check is a pair: the name to report if
    it cannot be made, and the function.
    """
    installed = _version()
    yield "sockets", [
        ("directory", partial(sockets.directory, around)), ("sockets", partial(sockets.sockets, around)),
    ]  # fmt: skip
    yield "daemon", [
        ("admin", partial(serving.answering, around, trouble)),
        ("version", partial(serving.versions, around, installed)),
        ("engine's way", partial(serving.as_an_engine, around, arguments.timeout)),
        ("systemd", partial(machine.unit, around)), ("settings", partial(_settings, around)),
        ("secret", partial(serving.secret, around)), ("certificate", partial(serving.certificate, around)),
    ]  # fmt: skip
    yield "limits", [
        ("open files", partial(limits.descriptors, around)), ("locked memory", partial(limits.locked_memory, around)),
        ("memory limit", partial(limits.cgroup_memory, around)),
    ]  # fmt: skip
    yield "memory", [
        ("capacity", partial(limits.capacity, around)), ("memfd", partial(limits.shared, around)),
        ("huge pages", partial(limits.huge_pages, around)),
    ]  # fmt: skip
    speed = [] if arguments.no_disk_test else [("speed", partial(disk.speed, around, progress.say))]
    yield "disk", [
        ("directory", partial(disk.directory, around)), ("room", partial(disk.room, around)),
        ("file system", partial(disk.file_system, around)), ("direct I/O", partial(disk.direct, around)), *speed,
    ]  # fmt: skip
    if tiers.gpu_tiers(around.settings):
        yield "gpu", [
            ("cuda-bindings", tiers.library), ("nvidia", partial(tiers.devices, around)),
            ("unit", partial(tiers.unit, around)),
        ]  # fmt: skip
    if remote := tiers.remote_tiers(around.settings):
        yield "remote", [
            *((name, partial(tiers.remote_tier, around, name)) for name in remote),
            ("cluster secret", partial(tiers.cluster, around)),
        ]  # fmt: skip
    yield "machine", [
        ("kernel", partial(machine.kernel, around)), ("users", partial(machine.user_namespace, around)),
        ("processors", partial(machine.processors, around)),
        ("clock", partial(clock.check, around)),
    ]  # fmt: skip
    yield "packages", [("python", machine.python)]


def _findings(checks: Iterable[tuple[str, Check]]) -> Iterator[Finding]:
    for name, check in checks:
        yield from guarded(name, check)


def _settings(around: Surroundings) -> Iterator[Finding]:
    """Report the source of the settings that the checks measure against."""
    if around.settings.problem:
        advice = "see `kvstored config` for every setting; checks against settings are left out"
        yield fail("settings", f"{around.settings.source}: {around.settings.problem}", advice)
    else:
        hint = "" if around.status is not None else "--config FILE or --state-dir DIR, if it runs with others"
        yield ok("settings", f"from {around.settings.source}", hint)


def render(areas: Areas, width: int) -> str:
    """Return the findings, by area, as text of `width` columns for people: a line for each finding, with its advice
    below.
    """
    colour = wants_colour(sys.stdout)
    name_width = max((len(finding.name) for _, found in areas for finding in found), default=0)
    lines: list[str] = []
    for area, found in areas:
        lines.append(Line().add(area, "bold").render(width, colour=colour))
        for finding in found:
            word = finding.level.value.upper() if finding.level is Level.FAIL else finding.level.value
            line = Line().add("  ").add(f"{word:5}", _STYLES[finding.level])
            line.add(f"{finding.name:{name_width}}  ").add(finding.seen)
            lines.append(line.render(line.width, colour=colour))
            style = "dim" if finding.level is Level.OK else ""
            for piece in _advice(finding.advice, width - name_width - 12):
                lines.append(Line().add(" " * (name_width + 9)).add(piece, style).render(1000, colour=colour))
    counts = _counts(areas)
    summary = ", ".join(f"{counts[level.value]} {level.value}" for level in Level)
    worst = "red" if counts["fail"] else "yellow" if counts["warn"] else "green"
    return "\n".join([*lines, "", Line().add(summary, worst).render(width, colour=colour)])


def _advice(text: str, room: int) -> list[str]:
    """Return the advice as lines: wrapped on a terminal, one line in a pipe, where it can be searched and copied."""
    if not text:
        return []
    pieces = textwrap.wrap(text, max(40, room), break_on_hyphens=False) if is_terminal(sys.stdout) else [text]
    return [f"{'->' if number == 0 else '  '} {piece}" for number, piece in enumerate(pieces)]


def document(areas: Areas) -> dict[str, Any]:
    """Return the findings, by area, as a document for --json."""
    return {
        **_counts(areas),
        "checks": [
            {"area": area, "name": item.name, "level": item.level.value, "seen": item.seen, "advice": item.advice}
            for area, found in areas
            for item in found
        ],
    }


def _counts(areas: Areas) -> dict[str, int]:
    levels = [finding.level for _, found in areas for finding in found]
    return {level.value: levels.count(level) for level in Level}


def _version() -> str:
    try:
        return version(machine.DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
