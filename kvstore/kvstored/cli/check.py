"""`kvstored check`: checks every invariant of an NVMe directory that no daemon is using, and repairs it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import Commands
from kvstore_console.printable import printable
from kvstored.exits import EXIT_DAMAGE, EXIT_OK, failure, mistake

if TYPE_CHECKING:
    from kvstore_console.progress import Progress
    from kvstore_tiers.nvme.check_slab import SlabFinding
    from kvstore_tiers.nvme.repair import RepairReport

EXAMPLES = """\
examples:
  kvstored check /var/lib/kvstored/nvme
  kvstored check /var/lib/kvstored/nvme --payloads --notes
  kvstored check /var/lib/kvstored/nvme --payloads --repair --dry-run
  kvstored check /var/lib/kvstored/nvme --payloads --repair

A finding is a note (worth knowing), a leftover of a crash (the next start clears it up) or damage (bytes are wrong).
exit status: 0 no damage, or none is left after --repair; 1 it cannot be looked at, or a daemon has it open;
2 a mistake in the arguments; 3 there is damage, or some is left after --repair
"""


def add_check(commands: Commands) -> None:
    check = commands.add_parser(
        "check",
        help="walk every invariant of an NVMe directory that no daemon is using",
        description="Walk every invariant of an NVMe directory that no daemon is using, and repair it if asked.",
        epilog=EXAMPLES,
    )
    check.add_argument("directory", type=Path)
    check.add_argument("--payloads", action="store_true", help="also read and verify every payload (slow)")
    check.add_argument("--capacity", metavar="SIZE", help="also hold the directory to this capacity, such as 8GiB")
    check.add_argument("--notes", action="store_true", help="also list findings that are no damage")
    check.add_argument("--repair", action="store_true", help="repair what can be repaired and list what was done")
    check.add_argument("--dry-run", action="store_true", help="with --repair: print the repairs, change nothing")
    check.add_argument("--json", action="store_true", help="one JSON object")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from kvstore_console.progress import Progress
    from kvstore_console.units import parse_size
    from kvstore_tiers.nvme.check import check_directory
    from kvstore_tiers.nvme.directory_files import DirectoryError
    from kvstore_tiers.nvme.repair import repair_directory

    if wrong := what_is_wrong(arguments.directory):
        return mistake(wrong)
    if arguments.dry_run and not arguments.repair:
        return mistake("--dry-run says what --repair would do: give both")
    try:
        capacity_bytes = None if arguments.capacity is None else parse_size(arguments.capacity, 0)
    except ValueError as error:
        return mistake(f"--capacity: {error}")
    try:
        with Progress("kvstored check") as progress:
            options: dict[str, Any] = {
                "capacity_bytes": capacity_bytes, "verify_payloads": arguments.payloads, "progress": _counted(progress),
            }  # fmt: skip
            if arguments.repair:
                report = repair_directory(arguments.directory, dry_run=arguments.dry_run, **options)
            else:
                findings = check_directory(arguments.directory, notes=arguments.notes, **options)
    except (OSError, DirectoryError) as error:
        return failure(f"cannot {'repair' if arguments.repair else 'check'} {arguments.directory}: {error}")
    return _report_repair(arguments, report) if arguments.repair else _report_check(arguments, findings)


def _counted(progress: Progress) -> Callable[[int], None]:
    """Return a function that adds up the bytes read, for `progress`."""
    from kvstore_console.units import human_bytes

    read_bytes = 0

    def add(nbytes: int) -> None:
        nonlocal read_bytes
        read_bytes += nbytes
        progress.say(f"{human_bytes(read_bytes)} read")

    return add


def _report_check(arguments: argparse.Namespace, findings: list[SlabFinding]) -> int:
    damaged = _is_damaged(findings)
    if arguments.json:
        listed = [_plain(finding) for finding in findings]
        print(json.dumps({"directory": str(arguments.directory), "damaged": damaged, "findings": listed}))
    else:
        for finding in findings:
            print(printable(str(finding)))
        print("damaged" if damaged else "no damage found")
    return EXIT_DAMAGE if damaged else EXIT_OK


def _report_repair(arguments: argparse.Namespace, report: RepairReport) -> int:
    remaining = report.found if arguments.dry_run else [finding for finding, _ in report.left]
    damaged = _is_damaged(remaining)
    if arguments.json:
        document = {
            "directory": str(arguments.directory),
            "dry_run": arguments.dry_run,
            "damaged": damaged,
            "found": [_plain(finding) for finding in report.found],
            "done": report.done,
            "left": [{**_plain(finding), "why": why} for finding, why in report.left],
        }
        print(json.dumps(document))
        return EXIT_DAMAGE if damaged else EXIT_OK
    for line in report.done:
        print(printable(line))
    for finding, why in report.left:
        print(printable(f"left: {finding}: {why}"))
    if not report.found:
        print("nothing to repair")
    elif arguments.dry_run:
        print("nothing was changed")
    else:
        print("damage is left" if damaged else "repaired")
    return EXIT_DAMAGE if damaged else EXIT_OK


def _is_damaged(findings: list[SlabFinding]) -> bool:
    from kvstore_tiers.nvme.check_slab import Severity

    return any(finding.severity is Severity.DAMAGE for finding in findings)


def _plain(finding: SlabFinding) -> dict[str, Any]:
    return {
        "severity": finding.severity.value,
        "kind": finding.kind.value,
        "where": finding.where,
        "what": finding.what,
        "slab": finding.slab if finding.slab >= 0 else None,
        "slot": finding.slot if finding.slot >= 0 else None,
    }


def what_is_wrong(directory: Path) -> str | None:
    """Return one line that says why `directory` is not the directory of an NVMe tier, or None if it is one."""
    if not directory.is_dir():
        return f"{directory} is not a directory"
    if (directory / "slabs").is_dir() or (directory / "format").exists():
        return None
    below = directory / "nvme"  # an operator who gives the state directory means this
    hint = f"; did you mean {below}?" if (below / "slabs").is_dir() else ""
    return f"{directory} is not the directory of an NVMe tier: it has no slabs{hint}"
