"""The worker itself: loads the model, maps the pool and the mailbox, computes steps until its parent has gone.

    python -m kvstore_engine.worker SOCKET MODEL POOL MAILBOX    (four inherited descriptors)

It owns the process it runs in. It does not schedule, and writes to the pool only by computing.

It ends with its parent: between steps it reads the socket's end, and within a step a thread that waits for nothing else
exits the process. The parent handles SIGINT and SIGTERM: they reach every process of a terminal or a service at once,
and a worker that obeyed would cut off answers that the parent is still finishing.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from functools import partial
from pathlib import Path

from kvstore_engine.devices import CPU
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.executors import DeviceName, StepExecutor
from kvstore_engine.gguf import GGUFFile, OpenFile
from kvstore_engine.opening import open_executor
from kvstore_engine.worker.mailbox import Mailbox
from kvstore_engine.worker.memory import attach
from kvstore_engine.worker.packets import MAX_PACKET_BYTES, EngineWorkerSetup, Order, Reply, Status

_OOM_SCORE = Path("/proc/self/oom_score_adj")
_FIRST_VICTIM = "300"  # when memory runs out, the process that can be replaced at no loss goes before its parent


def serve(connection: socket.socket, model_descriptor: int, pool_descriptor: int, mailbox_descriptor: int) -> None:
    """Open the model, then compute the steps that the parent process orders over `connection`, until the connection is
    closed. The three descriptors are of the model's file, of the pool's memory and of the mailbox (shared memory for
    steps and their logits).
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        _OOM_SCORE.write_text(_FIRST_VICTIM)
    threading.Thread(target=_end_with, args=(connection.fileno(),), daemon=True).start()
    setup = EngineWorkerSetup.decode(connection.recv(MAX_PACKET_BYTES))
    with contextlib.ExitStack() as stack:
        try:
            file = GGUFFile.open(OpenFile.inherited(setup.model, model_descriptor))
            memory = partial(attach, pool_descriptor)
            executor = stack.enter_context(open_executor(file, DeviceName(CPU), setup.pool, setup.sizes, memory))
        except UsageError as error:
            connection.send(Reply(0, Status.USAGE, message=str(error)).encode())
            return
        except (OperationError, OSError, MemoryError) as error:
            connection.send(Reply(0, Status.OPERATION, message=str(error) or type(error).__name__).encode())
            return
        mailbox = Mailbox(executor.limits, partial(attach, mailbox_descriptor))
        connection.send(Reply(0, Status.DONE).encode())
        while packet := connection.recv(MAX_PACKET_BYTES):
            connection.send(_compute(executor, mailbox, Order.decode(packet)).encode())


def _compute(executor: StepExecutor, mailbox: Mailbox, order: Order) -> Reply:
    if order.threads != executor.threads:
        executor.threads = order.threads
    slices, logits = mailbox.read(order.slices), mailbox.logits(order.step)
    begin_ns = time.perf_counter_ns()
    try:
        logits = executor.forward(slices, logits)
    except ValueError as error:
        return Reply(order.step, Status.INVALID, message=str(error))
    except RuntimeError as error:
        return Reply(order.step, Status.FAILED, message=str(error))
    return Reply(order.step, Status.DONE, len(logits), time.perf_counter_ns() - begin_ns)


def _end_with(handle: int) -> None:
    """Exit the process when the other end of `handle` is closed: a step of a dead parent has no use."""
    poll = select.poll()
    poll.register(handle, 0)  # POLLHUP is always reported
    while not any(event & (select.POLLHUP | select.POLLERR) for _, event in poll.poll()):
        pass
    os._exit(0)


if __name__ == "__main__":
    handle, model, pool, mailbox = map(int, sys.argv[1:5])
    serve(socket.socket(fileno=handle), model, pool, mailbox)
