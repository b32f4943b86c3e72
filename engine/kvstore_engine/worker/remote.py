"""An executor whose ggml runs in another process, and which outlives that process.

The module owns the worker, its socket and restarts, and the mailbox. It does not sample or schedule, and never loses
K/V: the pool's memory belongs to the caller.

When a worker dies, a new one computes the step again: computing writes K and V of the step's own positions and nothing
else, so doing it twice changes nothing. A step that has killed `_ATTEMPTS` workers is taken apart: each slice runs
alone, and slices that kill a worker again are named in `StepFailed`.
"""

from __future__ import annotations

import logging
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.executors.logits import FloatArray, HostLogits, StepLogits
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import FileWatch
from kvstore_engine.graph.step import SequenceSlice
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool
from kvstore_engine.worker.mailbox import Mailbox
from kvstore_engine.worker.memory import SharedMemory
from kvstore_engine.worker.packets import MAX_PACKET_BYTES, EngineWorkerSetup, Order, Reply, Status
from kvstore_engine.worker.patience import StepPatience

_HINTS = {
    "SIGABRT": ", ggml's assertion is above",
    "SIGBUS": ", the model file was cut short or cannot be read",
    "SIGKILL": ", perhaps for lack of memory",
}
_START_TIMEOUT_S = 600.0  # a large model is read and repacked in this time
_ATTEMPTS = 3
_START_ATTEMPTS = 5
_FIRST_PAUSE_S = 0.1
_log = logging.getLogger(__name__)


class StepFailed(RuntimeError):
    """An error: a step cannot be computed. `slices` are the indices of the slices at fault; the other slices can be
    tried again. K and V at the positions of this step are undefined.
    """

    def __init__(self, message: str, slices: tuple[int, ...]) -> None:
        super().__init__(message)
        self.slices = slices


@dataclass(frozen=True, slots=True)
class EngineWorkerNotice:
    """A report about the worker process `pid`: it has started, is ready or has died. `deaths` counts the deaths of
    workers so far; `reason` explains a death.
    """

    state: Literal["starting", "ready", "dead"]
    pid: int
    deaths: int
    reason: str = ""


class EngineWorkerDied(Exception):
    """An error: the worker process has ended, or was killed because it did not answer. The message says how."""


class EngineWorkerProcess:
    """A child process that computes steps, with the connection to it. Call `receive` once after the start: that reply
    says whether the model could be opened.
    """

    def __init__(
        self, setup: EngineWorkerSetup, model_descriptor: int, pool_descriptor: int, mailbox_descriptor: int
    ) -> None:
        # Datagrams with a connection: a packet is whole, and the end of a process is the end of its socket.
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            passed = (theirs.fileno(), model_descriptor, pool_descriptor, mailbox_descriptor)
            # Never a fork of this process: its threads' locks would come along without the threads.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvstore_engine.worker", *map(str, passed)],
                stdin=subprocess.DEVNULL,
                pass_fds=passed,
                process_group=0,  # a terminal's signals are the parent's
            )
        self._send(setup.encode())

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when the process ends, as long as no step is being computed."""
        return self._socket.fileno()

    def order(self, order: Order, timeout_s: float) -> Reply:
        """Send `order` to the process and return its reply. Raises EngineWorkerDied if the process ends, or if it does
        not reply within `timeout_s` seconds, after which it is killed.
        """
        self._send(order.encode())
        return self.receive(timeout_s)

    def receive(self, timeout_s: float) -> Reply:
        self._socket.settimeout(timeout_s)
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            self.end()
            raise EngineWorkerDied(f"it did not answer within {timeout_s:g} s and was killed") from None
        except OSError:
            packet = b""
        if not packet:
            raise EngineWorkerDied(self._ending())
        return Reply.decode(packet)

    def end(self) -> None:
        """Kill the process and wait until it has ended."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _send(self, packet: bytes) -> None:
        try:
            self._socket.send(packet)
        except OSError:
            raise EngineWorkerDied(self._ending()) from None

    def _ending(self) -> str:
        """Return how it ended. Its socket is closed, so it is dead or about to be."""
        try:
            status = self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:  # it closed its socket and still runs: it cannot be used
            status = None
        self.end()
        if status is None:
            return "it closed its connection and was killed"
        if status >= 0:
            return f"it exited with status {status}"
        name = signal.Signals(-status).name
        hint = _HINTS.get(name, "")
        return f"it was ended by {name}{hint}"


class RemoteExecutor:
    """A `Compute` whose steps run in a worker process, which is replaced when it dies. The K/V of `pool` is in
    `pool_memory`, which both processes map, so no K/V is lost with a worker. Logits stay valid until the step after the
    next. `on_notice` is called when a worker starts, is ready or has died.
    """

    def __init__(
        self,
        watch: FileWatch,
        config: ModelConfig,
        pool: BlockPool,
        pool_memory: SharedMemory,
        sizes: StepSizes,
        *,
        patience: StepPatience | None = None,
        on_notice: Callable[[EngineWorkerNotice], None] | None = None,
    ) -> None:
        """Start the worker and wait until it has loaded the model from the open file that `watch` watches. `patience`
        gives the time limits of steps. Raises UsageError and OperationError if the model cannot be loaded. Raises
        FileChanged, here and at each later start of a worker, if the file has changed.
        """
        self.pool, self.threads = pool, sizes.threads
        self.limits = sizes.limits(config.vocabulary, pool)
        self.deaths = 0
        self._watch = watch
        setup = PoolSetup(pool.blocks, pool.block_tokens, pool.kv_dtype, self.limits.window_blocks, pool.selection)
        self._setup = EngineWorkerSetup(str(watch.file.path), setup, sizes)
        self._patience = patience or StepPatience()
        self._on_notice = on_notice or (lambda notice: None)
        self._pool_memory = pool_memory
        self._mail_memory = SharedMemory("kvengine-steps", touched=False)
        self._mailbox = Mailbox(self.limits, self._mail_memory.allocate)
        self._step = 0
        self._has_served = False
        self._worker: EngineWorkerProcess | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The process number of the worker; 0 while there is none."""
        return self._worker.pid if self._worker else 0

    def fileno(self) -> int:
        """Return a descriptor that becomes readable between two steps when the worker process has died. The caller then
        calls `revive`.
        """
        return self._living().fileno()

    def forward(self, slices: Sequence[SequenceSlice]) -> FloatArray:
        """Compute one step of `slices` in the worker and return its logits, float32 [rows, vocabulary].

        Raises ValueError for a step that exceeds a limit. Raises StepFailed if the step kills one worker after another
        or ggml reports a failure, and OperationError if no worker can be started any more.
        """
        self._mailbox.write(slices)
        for _ in range(_ATTEMPTS):
            try:
                return self._compute(slices)
            except EngineWorkerDied as error:
                self._on_worker_death(error)
                self._start()
        self._take_apart(slices)
        raise AssertionError("unreachable")

    def step(self, slices: Sequence[SequenceSlice], whole: Sequence[int] | None = None) -> StepLogits:
        """Compute one step of `slices` in the worker and return its logits, which are in host memory. `whole` is
        ignored. Raises the errors of `forward`.
        """
        return HostLogits(self.forward(slices))

    def revive(self) -> None:
        """Start another worker process in place of one that died between two steps."""
        worker = self._living()
        try:
            worker.receive(_FIRST_PAUSE_S)  # nothing was ordered: this is the end of it
            worker.end()  # it speaks out of turn: no order could be sure of its answer
        except EngineWorkerDied as error:
            self._on_worker_death(error)
        self._start()

    def close(self) -> None:
        """End the worker process. The K/V pool and its memory stay."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None
        self._mail_memory.close()

    def _living(self) -> EngineWorkerProcess:
        if self._worker is None:
            raise RuntimeError("the executor is closed")
        return self._worker

    def _compute(self, slices: Sequence[SequenceSlice]) -> FloatArray:
        """Compute the step of `slices`, which is in the mailbox, in this worker. Raises EngineWorkerDied."""
        self._step += 1
        count = len(slices)
        order = Order(self._step, count, self.threads)
        reply = self._living().order(order, self._patience.limit_s(slices))
        assert reply.step == self._step, "one order is out at a time"
        if reply.status is Status.INVALID:
            raise ValueError(reply.message)
        if reply.status is not Status.DONE:
            raise StepFailed(reply.message, tuple(range(count)))
        self._patience.took(slices, reply.compute_ns / 1e9)
        return self._mailbox.logits(self._step, reply.rows)

    def _take_apart(self, slices: Sequence[SequenceSlice]) -> None:
        """Find out which of `slices` kill a worker by themselves; always raises StepFailed."""
        culprits: list[int] = []
        reason = f"this step ended {_ATTEMPTS} workers"
        for index, piece in enumerate(slices):
            if len(slices) == 1:
                culprits.append(index)
                break
            self._mailbox.write([piece])
            try:
                self._compute([piece])
            except StepFailed as error:
                reason = str(error)
                culprits.append(index)
            except EngineWorkerDied as error:
                reason = f"computing this sequence ended {_ATTEMPTS + 1} workers: {error}"
                culprits.append(index)
                self._on_worker_death(error)
                self._start()
        raise StepFailed(f"ggml failed: {reason}", tuple(culprits) or tuple(range(len(slices))))

    def _on_worker_death(self, error: EngineWorkerDied) -> None:
        """Count and log the death, and notify the owner."""
        pid = self.pid
        self._living().end()
        self.deaths += 1
        _log.error("the ggml worker (pid %d) died: %s; death %d", pid, error, self.deaths)
        self._on_notice(EngineWorkerNotice("dead", pid, self.deaths, str(error)))

    def _start(self) -> None:
        """Start a new worker, and return when it is ready. Restarts are retried for a while: the cause of the last
        death may hit the next worker.
        """
        pause_s, last = _FIRST_PAUSE_S, ""
        attempts = _START_ATTEMPTS if self._has_served else 1
        for attempt in range(attempts):
            if attempt:
                time.sleep(pause_s)
                pause_s *= 4
            self._watch.check()
            self._worker = EngineWorkerProcess(self._setup, *self._descriptors())
            self._on_notice(EngineWorkerNotice("starting", self.pid, self.deaths))
            try:
                reply = self._worker.receive(_START_TIMEOUT_S)
                if not self._watch.check():
                    raise EngineWorkerDied("the model file was touched while it was loaded")
                _raise_refusal(reply)
            except EngineWorkerDied as error:
                last = str(error)
                self._on_worker_death(error)
                continue
            self._has_served = True
            self._on_notice(EngineWorkerNotice("ready", self.pid, self.deaths))
            if self.deaths:
                _log.warning("a new ggml worker is ready (pid %d); no K/V was lost", self.pid)
            return
        raise OperationError(f"no ggml worker can be started ({attempts} attempts): {last}")

    def _descriptors(self) -> tuple[int, int, int]:
        """Return the descriptors of the model, the pool and the mailbox, for a worker to inherit."""
        return self._watch.file.source.descriptor, self._pool_memory.descriptor, self._mail_memory.descriptor


def _raise_refusal(reply: Reply) -> None:
    if reply.status is Status.USAGE:
        raise UsageError(reply.message)
    if reply.status is not Status.DONE:
        raise OperationError(reply.message)
