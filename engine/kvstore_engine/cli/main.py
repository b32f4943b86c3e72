"""The entry point of `kvengine`: parses the command line, runs a command, turns errors into exit codes.

The module maps errors to exit codes: 0 done, 1 something failed (network, disk, daemon required), 2 the user's mistake;
each is one line on stderr. Any other error is a bug and keeps its traceback. Nothing heavy is imported before a command
runs, so that `--help` answers at once.
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

from kvstore_console.command_line import parse, report_error, run_program
from kvstore_engine.cli import arguments
from kvstore_proto.version import pip_install

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_OURS = ("kvstore_console", "kvstore_proto", "kvstore_client", "kvstore_engine")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command `kvengine` with the arguments `argv`, by default the arguments of the process, and return the
    exit code.
    """
    return run_program("kvengine", argv, lambda: _run(parse(arguments.parser(), argv)))


def _run(options: argparse.Namespace) -> int:
    from kvstore_engine.errors import OperationError, UsageError
    from kvstore_engine.ggml import GGMLError
    from kvstore_engine.gguf import GGUFError
    from kvstore_engine.model.metadata import UnsupportedModel

    try:
        return int(import_module(f"kvstore_engine.cli.{options.command}").run(options))
    except (UsageError, GGUFError, UnsupportedModel, GGMLError) as error:
        return _fail(error, EXIT_USAGE)
    except OperationError as error:
        return _fail(error, EXIT_FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            raise
        return _fail(f"the Python package {error.name!r} is missing: {pip_install('engine')}", EXIT_USAGE)


def _fail(error: object, code: int) -> int:
    return report_error("kvengine", " ".join(str(error).split()), code)
