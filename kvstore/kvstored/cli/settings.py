"""The arguments that choose a configuration, the same for every command that needs one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path


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


def overrides(arguments: argparse.Namespace) -> list[str]:
    """What the command line sets, as `load_config` takes it."""
    short = [
        f"daemon.{key}={json.dumps(value)}"
        for key, value in (("socket_dir", arguments.socket_dir), ("state_dir", arguments.state_dir))
        if value is not None
    ]
    return [*short, *arguments.set]
