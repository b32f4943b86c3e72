"""The `kvstored` command: serve, check, inspect, config. Parses, reports mistakes in one line, starts things."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvstored import __version__

EXAMPLES = """\
examples:
  kvstored serve --config /etc/kvstored/kvstored.toml
  kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state --set host.capacity=2GiB --set nvme.capacity=8GiB
  kvstored check /var/lib/kvstored/nvme
  kvstored config > kvstored.toml

exit status: 0 all is well; 1 it failed (the message says how); 2 a mistake in the arguments or the configuration;
3 check found damage
"""
EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_DAMAGE = 0, 1, 2, 3


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstored",
        description="Tiered KV-cache storage daemon for LLM inference nodes.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvstored {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="run the daemon in the foreground")
    _config_arguments(serve)
    serve.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="walk every invariant of an NVMe directory that no daemon is using")
    check.add_argument("directory", type=Path)
    check.add_argument("--payloads", action="store_true", help="also read and verify every payload (slow)")
    check.add_argument("--json", action="store_true", help="one JSON object")
    check.set_defaults(run=_check)

    config = commands.add_parser("config", help="print the reference configuration, or check a file")
    _config_arguments(config)
    config.add_argument("--check", action="store_true", help="say whether --config and --set are usable")
    config.set_defaults(run=_config)
    return parser


def _config_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="TOML file (see: kvstored config); default: the defaults")
    parser.add_argument("--socket-dir", help="short for --set daemon.socket_dir=DIR")
    parser.add_argument("--state-dir", help="short for --set daemon.state_dir=DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting; repeatable",
    )


def _serve(arguments: argparse.Namespace) -> int:
    import logging

    from kvstored.config import ConfigError, load_config

    logging.basicConfig(
        level=arguments.log_level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    try:
        config = load_config(arguments.config, _overrides(arguments))
    except ConfigError as error:
        return _mistake(str(error))
    from kvstore_tiers.failpoints import ENVIRONMENT, unknown_names
    from kvstored.daemon import StartupError, run

    if unknown_names():
        return _mistake(f"{ENVIRONMENT} arms what does not exist: {', '.join(unknown_names())}")
    try:
        return run(config)
    except ConfigError as error:  # what the configuration names turned out not to be usable
        return _mistake(str(error))
    except StartupError as error:
        print(f"kvstored: {error}", file=sys.stderr)
        return EXIT_FAILED


def _config(arguments: argparse.Namespace) -> int:
    from kvstored.config import ConfigError, load_config, reference_text

    if not arguments.check:
        print(reference_text(), end="")
        return EXIT_OK
    try:
        config = load_config(arguments.config, _overrides(arguments))
    except ConfigError as error:
        return _mistake(str(error))
    print(f"usable: {config.source}")
    return EXIT_OK


def _check(arguments: argparse.Namespace) -> int:
    from kvstore_tiers.nvme.check import Severity, check_directory
    from kvstore_tiers.nvme.errors import DirectoryError

    if not arguments.directory.is_dir():
        return _mistake(f"{arguments.directory} is not a directory")
    try:
        findings = check_directory(arguments.directory, verify_payloads=arguments.payloads)
    except (OSError, DirectoryError) as error:
        print(f"kvstored: cannot check {arguments.directory}: {error}", file=sys.stderr)
        return EXIT_FAILED
    damaged = any(finding.severity is Severity.DAMAGE for finding in findings)
    if arguments.json:
        listed = [{"severity": f.severity.value, "where": f.where, "what": f.what} for f in findings]
        print(json.dumps({"directory": str(arguments.directory), "damaged": damaged, "findings": listed}))
    else:
        for finding in findings:
            print(finding)
        print("damaged" if damaged else "no damage found")
    return EXIT_DAMAGE if damaged else EXIT_OK


def _overrides(arguments: argparse.Namespace) -> list[str]:
    short = [
        f"daemon.{key}={json.dumps(value)}"
        for key, value in (("socket_dir", arguments.socket_dir), ("state_dir", arguments.state_dir))
        if value is not None
    ]
    return [*short, *arguments.set]


def _mistake(message: str) -> int:
    print(f"kvstored: {message}", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
