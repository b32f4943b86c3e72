"""The HTTP process's end of the scheduler: it starts and restarts the child, sends requests, and distributes events.

The module owns the child process, its socket, and the requests that wait. It does not parse HTTP.

When the child dies, its requests fail; requests that arrive before the next child is ready are refused. A child that
cannot start ends the server the first time. Later starts are tried again: the cause may go away. Once the model's file
was found changed there are none: the tokenizer and the template here are the old file's.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

from kvstore_engine.batching.events import Event, Finished
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.gguf import FileChanged, FileDigest, OpenFile
from kvstore_engine.server.api_errors import ApiError, failed, invalid, overloaded, unavailable
from kvstore_engine.server.messages import Ask, Failure, FrameBuffer, Header, encode, pack_tokens, unpack_events
from kvstore_engine.server.options import EngineOptions, HandedFile

State = Literal["starting", "ready", "restarting", "stopped", "closed"]
_Item: TypeAlias = list[Event] | ApiError | None
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 30.0
_CALM_S = 60.0  # an engine that lived this long may be restarted at once again
_END_TIMEOUT_S = 10.0
_STATUS_TIMEOUT_S, _RECORDS_TIMEOUT_S = 1.0, 5.0
_STOPPED_RETRY_S = 60.0
# In steps. More than the socket's buffers hold: a client that reads at all is never that far behind.
_MOST_BEHIND = 8192
_log = logging.getLogger(__name__)


class EventQueue:
    """A queue of the engine's events for one HTTP response. An entry is the list of events of a step, or of several
    steps that arrived together.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._is_awaited = False
        self._write: Callable[[list[Event]], bool] | None = None

    @property
    def is_behind(self) -> bool:
        """True if many steps wait in the queue, which means that the client does not read."""
        return self._queue.qsize() >= _MOST_BEHIND

    def write_with(self, write: Callable[[list[Event]], bool]) -> None:
        """Let `write` take each step that arrives while `next` waits, which spares a task's turn for every token. It
        returns False for a step that has to go through the queue.
        """
        self._write = write

    def put(self, item: _Item) -> None:
        is_next = self._is_awaited and self._queue.empty()
        if self._write is None or not is_next or not isinstance(item, list) or not self._write(item):
            self._queue.put_nowait(item)

    def abandon(self) -> None:
        """Drop all events because the client has left. `next` then returns None."""
        self._queue = asyncio.Queue()
        self.put(None)

    async def next(self) -> list[Event] | None:
        """Wait for the events of one engine step and return them. Return None once the client has left. Raises ApiError
        if the request has failed.
        """
        self._is_awaited = True
        try:
            item = await self._queue.get()
        finally:
            self._is_awaited = False
        if isinstance(item, ApiError):
            raise item
        return item


class _Frames(asyncio.Protocol):
    """The scheduler's messages. `deliver` gets the events of all steps that have arrived; all other messages, and the
    errors of `deliver`, wait for `next`.
    """

    def __init__(self, deliver: Callable[[list[Event]], None]) -> None:
        self._deliver = deliver
        self._buffer = FrameBuffer()
        self._others: asyncio.Queue[Header | Exception | None] = asyncio.Queue()

    def data_received(self, data: bytes) -> None:
        try:
            events: list[Event] = []
            for header, _ in self._buffer.feed(data):
                if "events" in header:
                    events += unpack_events(header)
                else:
                    self._others.put_nowait(header)
            if events:
                self._deliver(events)
        except Exception as error:  # of any kind: who reads `next` ends the connection
            self._others.put_nowait(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.put_nowait(None)

    async def next(self) -> Header | None:
        """Wait for the next message that has no events, and return its header; None at the end."""
        item = await self._others.get()
        if isinstance(item, Exception):
            raise item
        return item


class EngineClient:
    """The HTTP process's side of the connection to the scheduler process. It starts that process, starts another when
    it dies, and sends it requests. Only the event loop's thread may use it.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self.state: State = "starting"
        self.context = 0
        self.restarts = 0
        self.trouble = ""  # why the engine is not ready
        self._file: OpenFile | None = None
        self._digest: FileDigest | None = None  # of the file, from the first child on
        self.worker: dict[str, Any] = {}
        self._process: asyncio.subprocess.Process | None = None
        self._frames: _Frames | None = None
        self._writer: asyncio.WriteTransport | None = None
        self._waiting: dict[str, EventQueue] = {}
        self._statuses: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count(1)
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process number of the scheduler; 0 while there is none."""
        return self._process.pid if self._process else 0

    @property
    def requests(self) -> int:
        """The number of requests whose answers have not ended."""
        return len(self._waiting)

    async def start(self, file: OpenFile) -> None:
        """Start the scheduler process and wait until it is ready with the model in `file`, which must stay open until
        `close`. Raises UsageError or OperationError with the reason if the process cannot start.
        """
        self._file = file
        try:
            await self._spawn()
        except BaseException:
            await self._end()
            raise
        self._task = asyncio.create_task(self._keep_alive())

    def submit(self, asks: Sequence[Ask]) -> EventQueue:
        """Send the requests `asks`, which one HTTP response will answer, to the scheduler process. Return the queue of
        their events. Raises ApiError 503 while the engine is not ready.
        """
        if self.state == "stopped":
            raise unavailable(self.trouble, _STOPPED_RETRY_S)
        if self.state != "ready" or self._writer is None:
            raise unavailable(f"the engine is {self.state}: try again in a moment")
        queue = EventQueue()
        for ask in asks:
            self._waiting[ask.id] = queue
            self._writer.write(encode(ask.header(), pack_tokens(ask.tokens)))
        return queue

    def cancel(self, request_ids: Sequence[str]) -> None:
        """Let the scheduler process stop the requests `request_ids`, because the client has left. No more events of
        them are delivered.
        """
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None and self._writer is not None:
                self._writer.write(encode({"op": "cancel", "id": request_id}))

    async def status(self) -> dict[str, Any] | None:
        """Return the scheduler process's report on itself; None if no report arrives within a second."""
        return await self._ask({"op": "status"}, _STATUS_TIMEOUT_S)

    async def restorations(self, last: int) -> list[dict[str, Any]] | None:
        """Return the records of the last restorations of prompts, at most `last`, the latest first; None if they do not
        arrive within five seconds.
        """
        answer = await self._ask({"op": "restorations", "last": last}, _RECORDS_TIMEOUT_S)
        return None if answer is None else answer["restorations"]

    async def _ask(self, question: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        if self.state != "ready" or self._writer is None:
            return None
        number = next(self._numbers)
        future = self._statuses[number] = asyncio.get_running_loop().create_future()
        self._writer.write(encode({**question, "seq": number}))
        try:
            return await asyncio.wait_for(future, timeout_s) or None
        except TimeoutError:
            return None
        finally:
            self._statuses.pop(number, None)

    async def close(self) -> None:
        """Close the connection, so that the scheduler process exits, and wait for its end."""
        was_ready, self.state = self.state == "ready", "closed"
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._end(patiently=was_ready)

    async def _spawn(self) -> None:
        assert self._file is not None
        model = HandedFile.of(self._file, self._digest)
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no module from the working directory
                "-m",
                "kvstore_engine.server.engine_process",
                str(theirs.fileno()),
                self._options.encode(),
                model.encode(),
                stdin=asyncio.subprocess.DEVNULL,
                process_group=0,  # a terminal's signals are for the HTTP process, also before this one can ignore them
                pass_fds=[theirs.fileno(), model.descriptor],
            )
        loop = asyncio.get_running_loop()
        self._writer, self._frames = await loop.create_connection(lambda: _Frames(self._deliver), sock=ours)
        while self.state != "ready":
            header = await self._receive()
            if header is None:
                raise OperationError(f"the engine's process ended with status {await self._process.wait()}")
            self._handle(header)

    async def _keep_alive(self) -> None:
        """Read until the child dies, start another, and so on."""
        try:
            await self._restart_for_ever()
        except FileChanged as error:
            self.state, self.trouble = "stopped", str(error)
            self.worker = self.worker and {**self.worker, "state": "dead"}
            _log.error("%s; nothing more is answered or stored", self.trouble)
            self._fail_all(unavailable(self.trouble, _STOPPED_RETRY_S))
            await self._end(patiently=True)

    async def _restart_for_ever(self) -> None:
        """Restart the child until that succeeds. Raises FileChanged once that is of no use."""
        pause_s = _FIRST_PAUSE_S
        while True:
            begin_s, self.trouble = time.monotonic(), ""
            reason = "its socket was closed"
            try:
                while (header := await self._receive()) is not None:
                    self._handle(header)
            except FileChanged:
                raise
            except (UsageError, OperationError) as error:  # the reason is the child's own
                reason = str(error)
            except Exception as error:  # of any kind: without a reader no request would ever end
                reason = f"it sends nonsense: {type(error).__name__}: {error}"
            self.state, self.trouble = "restarting", f"the engine's process has ended: {reason}"
            _log.error("%s; %d requests fail; it is started again", self.trouble, len(self._waiting))
            self._fail_all(unavailable("the engine's process ended in the middle of this answer: try again", 2.0))
            if time.monotonic() - begin_s > _CALM_S:
                pause_s = _FIRST_PAUSE_S
            await self._end()
            while not await self._restarted(pause_s):
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            _log.warning("the engine is ready again")

    async def _restarted(self, pause_s: float) -> bool:
        """Try to start another child after a pause; return whether it succeeded."""
        await asyncio.sleep(pause_s)
        self.restarts += 1
        try:
            await self._spawn()
        except FileChanged:
            raise
        except Exception as error:  # of any kind: without another try no request would ever be answered
            self.trouble = str(error) or type(error).__name__
            _log.error("the engine cannot be started again: %s", error)
            await self._end()
            return False
        return True

    async def _receive(self) -> Header | None:
        """Return the header of the scheduler's next message without events; None at the end."""
        assert self._frames is not None
        return await self._frames.next()

    def _handle(self, header: Header) -> None:
        if "refused" in header:
            queue = self._waiting.pop(header["refused"], None)
            if queue is not None:
                queue.put(_refusal(header))
        elif "status" in header:
            future = self._statuses.get(header["status"])
            if future is not None and not future.done():
                future.set_result(header)
        elif "worker" in header:
            self.worker = header["worker"]
        elif "ready" in header:
            self.context, self._digest = header["ready"]["context"], FileDigest(*header["ready"]["model"])
            self.state = "ready"
        elif "fatal" in header:
            kind, message = header["fatal"]["kind"], header["fatal"]["message"]
            raise _FAILURES[kind](message)

    def _deliver(self, events: list[Event]) -> None:
        """Deliver to each waiting answer its share of a step in one piece: one wake-up, one write to its client."""
        shares: dict[EventQueue, list[Event]] = {}
        for event in events:
            queue = self._waiting.get(event.request_id)
            if queue is not None:
                shares.setdefault(queue, []).append(event)
        for queue, share in shares.items():
            if queue.is_behind:
                self.cancel([request_id for request_id, waiting in self._waiting.items() if waiting is queue])
                queue.abandon()
            else:
                queue.put(share)

    def forget(self, event: Finished) -> None:
        """Remove the request of `event`, the end of its last answer, from the list of unfinished requests."""
        self._waiting.pop(event.request_id, None)

    def _fail_all(self, error: ApiError) -> None:
        for queue in set(self._waiting.values()):
            queue.put(error)
        self._waiting.clear()
        for future in self._statuses.values():
            if not future.done():
                future.set_result({})

    async def _end(self, *, patiently: bool = False) -> None:
        """End the child, and return when it has ended. `patiently`: it may first store the blocks it still holds."""
        if self._writer is not None:
            self._writer.close()
            self._writer = self._frames = None
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if patiently:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_TIMEOUT_S)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


_FAILURES: dict[Failure, type[Exception]] = {
    "usage": UsageError,
    "operation": OperationError,
    "changed": FileChanged,
}


def _refusal(header: Header) -> ApiError:
    message: str = header["message"]
    match header["kind"]:
        case "overloaded":
            return overloaded(message, header["retry_after_s"])
        case "usage":
            return invalid(message)
        case _:
            return failed(message)
