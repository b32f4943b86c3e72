"""`kvstored check`: every invariant of an NVMe directory that no daemon is using."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvstored.cli.exits import EXIT_DAMAGE, EXIT_OK, failure, mistake


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    check = commands.add_parser("check", help="walk every invariant of an NVMe directory that no daemon is using")
    check.add_argument("directory", type=Path)
    check.add_argument("--payloads", action="store_true", help="also read and verify every payload (slow)")
    check.add_argument("--json", action="store_true", help="one JSON object")
    check.set_defaults(run=_check)


def _check(arguments: argparse.Namespace) -> int:
    from kvstore_tiers.nvme.check import Severity, check_directory
    from kvstore_tiers.nvme.errors import DirectoryError

    if not arguments.directory.is_dir():
        return mistake(f"{arguments.directory} is not a directory")
    try:
        findings = check_directory(arguments.directory, verify_payloads=arguments.payloads)
    except (OSError, DirectoryError) as error:
        return failure(f"cannot check {arguments.directory}: {error}")
    damaged = any(finding.severity is Severity.DAMAGE for finding in findings)
    if arguments.json:
        listed = [{"severity": f.severity.value, "where": f.where, "what": f.what} for f in findings]
        print(json.dumps({"directory": str(arguments.directory), "damaged": damaged, "findings": listed}))
    else:
        for finding in findings:
            print(finding)
        print("damaged" if damaged else "no damage found")
    return EXIT_DAMAGE if damaged else EXIT_OK
