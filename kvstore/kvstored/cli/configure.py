"""`kvstored config`: prints the reference configuration, or checks one; and the options that choose a configuration,
for every command that needs one.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvstore_console.command_line import Commands
from kvstored.exits import EXIT_OK, mistake

EXAMPLES = """\
examples:
  kvstored config > kvstored.toml
  kvstored config --check --config /etc/kvstored/kvstored.toml
  kvstored config --check --set host.capacity=4GiB
"""


def add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, help="TOML file (see: kvstored config); default: the defaults")
    parser.add_argument("--socket-dir", help="short for --set daemon.socket_dir=DIR")
    parser.add_argument("--state-dir", help="short for --set daemon.state_dir=DIR")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="override one setting, such as host.capacity=4GiB; tier.NAME.KEY=VALUE also adds a tier; repeatable",
    )


def overrides(arguments: argparse.Namespace, *more: str) -> list[str]:
    """Return the settings given on the command line, each as "section.key=value". `more` names settings of the section
    daemon for which the command has options that `add_settings` does not add.
    """
    short = [
        f"daemon.{key}={json.dumps(value, ensure_ascii=False)}"
        for key in (*more, "socket_dir", "state_dir")
        if (value := getattr(arguments, key)) is not None
    ]
    return [*short, *arguments.set]


def add_config(commands: Commands) -> None:
    config = commands.add_parser(
        "config",
        help="print the reference configuration, or check a file",
        description="Print the reference configuration: every setting, its default and what it means. Or check a file.",
        epilog=EXAMPLES,
    )
    add_settings(config)
    config.add_argument("--check", action="store_true", help="say whether --config and --set are usable")
    config.set_defaults(run=_config)


def _config(arguments: argparse.Namespace) -> int:
    from kvstored.config import ConfigError, load_config, reference_text

    if not arguments.check:
        if arguments.config is not None or overrides(arguments):
            return mistake("config prints the defaults; to check --config and --set add --check")
        print(reference_text(), end="")
        return EXIT_OK
    try:
        config = load_config(arguments.config, overrides(arguments))
    except ConfigError as error:
        return mistake(str(error))
    print(f"usable: {config.source}")
    return EXIT_OK
