"""`python -m kvstore_engine.server.engine_process SOCKET OPTIONS MODEL`: the scheduler's process.

Owns the process: its signals, its log, and the report that it cannot start. SIGINT and SIGTERM are the HTTP process's
to handle: they reach every process of a terminal or a service at once, and this one has answers to finish.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys

from kvstore_console.log_format import log_to_stderr
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import GGUFError
from kvstore_engine.server.assembly import open_serving
from kvstore_engine.server.engine_loop import EngineLoop
from kvstore_engine.server.handed_file import HandedFile
from kvstore_engine.server.options import EngineOptions

_SWITCH_INTERVAL_S = 0.0005  # the daemon session's threads must not wait for a whole slice of the loop's


def main(connection: socket.socket, options: EngineOptions, model: HandedFile) -> int:
    """Serve until the other end closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    loop = EngineLoop(connection)
    try:
        with open_serving(options, model, loop.notice) as serving:
            limits = serving.engine.compute.limits
            context = serving.engine.context
            loop.send({"ready": {"context": context, "max_sequences": limits.max_sequences, "model": serving.digest}})
            loop.run(serving)
    except (UsageError, GGUFError, OperationError) as error:
        with contextlib.suppress(OSError):
            loop.fail(error)
        return 1
    except ConnectionError:
        return 0  # the HTTP process left while this one was starting
    return 0


if __name__ == "__main__":
    log_to_stderr(logging.INFO, "kvengine scheduler: %(levelname)s %(message)s")
    handle, options, model = sys.argv[1:4]
    sys.exit(main(socket.socket(fileno=int(handle)), EngineOptions.decode(options), HandedFile.decode(model)))
