"""The `kvstored` command: one file a subcommand. It parses, reports mistakes in one line, and starts the work."""

from __future__ import annotations

import sys
from importlib import import_module

from kvstore_console.command_line import Parser, parse, run_program
from kvstored import __version__
from kvstored.cli.serve import add_serve
from kvstored.exits import EXIT_DAMAGE, EXIT_FAILED, EXIT_HANGS, EXIT_OK, EXIT_USAGE

__all__ = ["EXIT_DAMAGE", "EXIT_FAILED", "EXIT_HANGS", "EXIT_OK", "EXIT_USAGE", "main"]

_SIMULATOR = "kvstore_simulator.cli"

EXAMPLES = """\
examples:
  kvstored serve --config /etc/kvstored/kvstored.toml
  kvstored serve --socket-dir /tmp/kv --state-dir /tmp/kv/state --set host.capacity=2GiB --set nvme.capacity=8GiB
  kvstored check /var/lib/kvstored/nvme
  kvstored inspect /var/lib/kvstored/nvme block 051e43b1d68c
  kvstored config > kvstored.toml

exit status: 0 all is well; 1 it failed (the message says how); 2 a mistake in the arguments or the configuration;
3 check found damage, or --repair left some; 4 serve could not stop in order, because a disk hangs
"""


def main(argv: list[str] | None = None) -> int:
    return run_program("kvstored", argv, lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    arguments = parse(_parser(sys.argv[1:] if argv is None else argv), argv)
    return int(arguments.run(arguments))


def _parser(argv: list[str]) -> Parser:
    """Return the parser of all commands; of `serve` alone if `argv` begins with it, so that a daemon starts sooner."""
    parser = Parser(
        prog="kvstored", description="Tiered KV-cache storage daemon for LLM inference nodes.", epilog=EXAMPLES
    )
    parser.add_argument("--version", action="version", version=f"kvstored {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog=parser.prog)
    add_serve(commands)
    if argv[:1] != ["serve"]:
        from kvstored.cli.check import add_check
        from kvstored.cli.configure import add_config
        from kvstored.cli.inspect import add_inspect

        for add in (add_check, add_inspect, add_config):
            add(commands)
        import_module(_SIMULATOR).add_commands(commands)  # it stands above the daemon, which must not import it
    return parser
