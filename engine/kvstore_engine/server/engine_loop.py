"""The loop of the engine's process: takes requests from the HTTP process, steps the engine, sends what a step brought.

Owns the order of those three, in one thread, and the reports on health and counters. It never tokenises or renders.

Between two steps it looks, without waiting, at the socket: so a cancellation holds from the next step on. With nothing
to compute it waits for the socket and for the end of the worker, where there is one, and looks at the model's file.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvstore_engine.batching import Event, Finished, Overloaded
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import FileChanged
from kvstore_engine.server.assembly import Serving
from kvstore_engine.server.frames import FrameReader, Header, encode, unpack_tokens
from kvstore_engine.server.messages import Failure, Refusal, events_headers, request_of
from kvstore_engine.worker import WorkerNotice

_LOOK_S = 1  # between two looks at the model's file while nothing is computed
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class StepCounters:
    """Since the process started. Figures of requests are counted in the HTTP process."""

    steps: int = 0
    step_s: float = 0.0
    preemptions: int = 0
    swaps: int = 0

    def count(self, seconds: float, events: Sequence[Event]) -> None:
        """A step took `seconds` and brought `events`."""
        self.steps += 1
        self.step_s += seconds
        for event in events:
            if isinstance(event, Finished):
                self.preemptions += event.usage.preemptions
                self.swaps += event.usage.swaps


class EngineLoop:
    """Made with the connection; `run` once everything is open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._frames = FrameReader(connection)
        self._counters = StepCounters()

    def send(self, header: Header) -> None:
        self._connection.sendall(encode(header))

    def notice(self, notice: WorkerNotice) -> None:
        """Notify the HTTP process at once: this process is about to wait for the new worker."""
        self.send({"worker": asdict(notice)})

    def fail(self, error: Exception) -> None:
        """Say why nothing is computed any more."""
        is_operation = isinstance(error, OperationError)
        kind: Failure = "changed" if isinstance(error, FileChanged) else "operation" if is_operation else "usage"
        self.send({"fatal": {"kind": kind, "message": str(error)}})

    def run(self, serving: Serving) -> None:
        """Drive `serving` until the HTTP process closes its end, or the model's file has changed. That is sent at once:
        what was computed before the change is still to be stored."""
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
        events = serving.engine.step()
        self._counters.count(time.monotonic() - begin_s, events)
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
