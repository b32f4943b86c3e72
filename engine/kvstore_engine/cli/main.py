"""The entry point of `kvengine`: parses the command line, runs a command, turns errors into exit codes.

Owns the mapping from errors to exit codes: 0 done, 1 something failed (network, disk, daemon required), 2 the
user's mistake, said in one line on stderr. Anything else is our bug and keeps its traceback. Nothing heavy is
imported before a command runs, so that `--help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from kvstore_engine.cli import arguments

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvengine` with `argv` (default: the process's); the exit code."""
    options = arguments.parser().parse_args(argv)
    try:
        code = _run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader has gone (`kvengine … | head`): not an error, but Python would complain once more at
        # exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(options: argparse.Namespace) -> int:
    from kvstore_engine.errors import OperationError, UsageError
    from kvstore_engine.ggml import GGMLError
    from kvstore_engine.gguf import GGUFError
    from kvstore_engine.model import UnsupportedModel

    command = _COMMANDS[options.command]
    try:
        return command(options)
    except (UsageError, GGUFError, UnsupportedModel, GGMLError) as error:
        return _say(error, EXIT_USAGE)
    except OperationError as error:
        return _say(error, EXIT_FAILED)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("kvstore_engine", "kvstore_client", "kvstore_proto"):
            raise
        return _say(f"the Python package {error.name!r} is missing: pip install 'kvstored[engine]'", EXIT_USAGE)


def _say(error: object, code: int) -> int:
    from kvstore_proto.printable import printable

    print(printable(f"kvengine: {' '.join(str(error).split())}"), file=sys.stderr)
    return code


def _generate(options: argparse.Namespace) -> int:
    from kvstore_engine.cli import generate

    return generate.run(options)


def _fetch(options: argparse.Namespace) -> int:
    from kvstore_engine.models import locate

    print(locate(options.model, options.quant))
    return EXIT_OK


def _info(options: argparse.Namespace) -> int:
    from kvstore_engine.cli import info

    return info.run(options)


def _serve(options: argparse.Namespace) -> int:
    from kvstore_engine.cli import serve

    return serve.run(options)


def _bench(options: argparse.Namespace) -> int:
    from kvstore_engine.cli import bench

    return bench.run(options)


_COMMANDS = {"bench": _bench, "serve": _serve, "generate": _generate, "fetch": _fetch, "info": _info}
