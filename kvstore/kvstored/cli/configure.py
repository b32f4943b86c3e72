"""`kvstored config`: the reference configuration, or whether one is usable."""

from __future__ import annotations

import argparse

from kvstored.cli.exits import mistake
from kvstored.cli.settings import add_settings, overrides
from kvstored.exits import EXIT_OK

EXAMPLES = """\
examples:
  kvstored config > kvstored.toml
  kvstored config --check --config /etc/kvstored/kvstored.toml
  kvstored config --check --set host.capacity=4GiB
"""


def add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    config = commands.add_parser(
        "config",
        help="print the reference configuration, or check a file",
        description="Print the reference configuration: every setting, its default and what it means. Or check a file.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
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
