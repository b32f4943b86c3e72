"""The scheduler's process: takes requests from the HTTP process, steps the engine, sends each step's events.

    python -m kvstore_engine.server.engine_process SOCKET OPTIONS MODEL

The module owns the order of these three, in one thread, the reports on health and counters, and the process: its
signals, its log, and the report that it cannot start. It does not tokenise or render. The HTTP process handles SIGINT
and SIGTERM: they reach every process of a terminal or a service at once, and this one has answers to finish.

Between two steps it looks, without waiting, at the socket: so a cancellation holds from the next step on. With nothing
to compute it waits for the socket and for the end of the worker, if there is one, and checks the model's file.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvstore_console.log_format import log_to_stderr
from kvstore_engine.batching.events import Event, Finished
from kvstore_engine.batching.intake import Overloaded
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import FileChanged, GGUFError
from kvstore_engine.server.assembly import Serving, open_serving
from kvstore_engine.server.messages import (
    Failure,
    FrameReader,
    Header,
    Refusal,
    encode,
    events_headers,
    request_of,
    unpack_tokens,
)
from kvstore_engine.server.options import EngineOptions, HandedFile
from kvstore_engine.worker import EngineWorkerNotice

_LOOK_S = 1  # between two looks at the model's file while nothing is computed
_log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.0005  # the daemon session's threads must not wait for a whole slice of the loop's


@dataclass(slots=True)
class StepCounters:
    """Counts since the scheduler process started: steps, seconds in steps, preemptions (answers that lost their blocks)
    and swaps.
    """

    steps: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    swaps: int = 0

    def count(self, seconds: float, events: Sequence[Event]) -> None:
        """Count a step that took `seconds` and produced `events`."""
        self.steps += 1
        self.step_s += seconds
        for event in events:
            if isinstance(event, Finished):
                self.preemptions += event.usage.preemptions
                self.swaps += event.usage.swaps


class EngineLoop:
    """The main loop of the scheduler process. It takes requests from the HTTP process over `connection`, runs steps of
    the engine, and sends the events back.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader(connection)
        self._counters = StepCounters()

    def send(self, header: Header) -> None:
        self._connection.sendall(encode(header))

    def notice(self, notice: EngineWorkerNotice) -> None:
        """Send the HTTP process the notice that a worker process has started, is ready or has died."""
        self.send({"worker": asdict(notice)})

    def fail(self, error: Exception) -> None:
        """Notify the HTTP process that nothing more will be computed, because of `error`."""
        is_operation = isinstance(error, OperationError)
        kind: Failure = "changed" if isinstance(error, FileChanged) else "operation" if is_operation else "usage"
        self.send({"fatal": {"kind": kind, "message": str(error)}})

    def run(self, serving: Serving) -> None:
        """Take requests and run steps of `serving` until the HTTP process closes the connection, or until the model's
        file has changed, which is reported.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        look_s = time.monotonic() + _LOOK_S
        try:
            while True:
                worker = serving.worker
                handles = [] if worker is None else [worker.fileno()]
                for handle in handles:
                    poll.register(handle, select.POLLIN)
                ready = {handle for handle, _ in poll.poll(0 if serving.engine.has_work else 1000 * _LOOK_S)}
                for handle in handles:
                    poll.unregister(handle)
                if self._connection.fileno() in ready:
                    self._receive(serving)
                if worker is not None and handles[0] in ready:
                    worker.revive()
                if serving.engine.has_work:
                    self._step(serving)
                elif time.monotonic() >= look_s:
                    serving.watch.check()
                    look_s = time.monotonic() + _LOOK_S
        except FileChanged as error:
            self.fail(error)
        except (EOFError, ConnectionError):
            _log.debug("the HTTP process has closed its end")

    def _step(self, serving: Serving) -> None:
        begin_s = time.monotonic()
        events = serving.engine.step(self._publish)
        self._counters.count(time.monotonic() - begin_s, events)

    def _publish(self, events: Sequence[Event]) -> None:
        for header in events_headers(events):
            self.send(header)

    def _receive(self, serving: Serving) -> None:
        for header, blob in self._frames.receive():
            match header["op"]:
                case "add":
                    self._add(serving, header, blob)
                case "cancel":
                    serving.engine.cancel(header["id"])
                case "restorations":
                    records = serving.engine.restorations.last(header["last"])
                    self.send({"status": header["seq"], "restorations": [each.as_json() for each in records]})
                case "status":
                    self.send({"status": header["seq"], **self._status(serving)})

    def _add(self, serving: Serving, header: Header, blob: bytes) -> None:
        try:
            serving.engine.add(request_of(header, unpack_tokens(blob), serving.constrainer, serving.tokenizer))
        except UsageError as error:
            self._refuse(header["id"], "usage", str(error))
        except Overloaded as error:
            self._refuse(header["id"], "overloaded", str(error), error.retry_after_s)
        except Exception as error:  # the failure of one request must not end those that run
            _log.exception("a request could not be taken in")
            self._refuse(header["id"], "failed", f"the engine could not take this request in: {type(error).__name__}")

    def _refuse(self, request_id: str, kind: Refusal, message: str, retry_after_s: float = 0.0) -> None:
        self.send({"refused": request_id, "kind": kind, "message": message, "retry_after_s": retry_after_s})

    def _status(self, serving: Serving) -> Header:
        pool, worker = serving.engine.compute.pool, serving.worker
        return {
            "sequences": {"running": serving.engine.running, "waiting": serving.engine.waiting},
            "pool": {"blocks": pool.blocks, "free_blocks": pool.free_blocks, "block_tokens": pool.block_tokens},
            "worker": {"pid": worker.pid, "deaths": worker.deaths} if worker else {"pid": 0, "deaths": 0},
            "kvstore": serving.sessions.state() if serving.sessions else "off",
            "counters": asdict(self._counters),
            "restored": asdict(serving.engine.restorations.totals),
        }


def main(connection: socket.socket, options: EngineOptions, model: HandedFile) -> int:
    """Run the scheduler process until the HTTP process closes `connection`. Return the exit status: 0, or 1 if the
    process could not start; the reason is sent over the connection.
    """
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
