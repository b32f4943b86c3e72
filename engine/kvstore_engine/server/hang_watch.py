"""Ends the process whose step hangs: a kernel that never ends can be ended in no other way.

Owns a thread, which waits for the step's limit. The server starts the process again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from kvstore_engine.graph import SequenceSlice
from kvstore_engine.worker.patience import StepPatience

_HUNG = 75  # EX_TEMPFAIL: another process may do better
_log = logging.getLogger(__name__)


def _end() -> None:
    os._exit(_HUNG)


class HangWatch:
    """Watches the steps of one thread until `close`; `end()` does not return, but in tests."""

    def __init__(self, patience: StepPatience, end: Callable[[], None] = _end) -> None:
        self._patience, self._end = patience, end
        self._changed = threading.Condition()
        self._due_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="hang watch", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def watching(self, slices: Sequence[SequenceSlice]) -> Iterator[None]:
        """A step of `slices` is computed within."""
        limit_s, begin_s = self._patience.limit_s(slices), time.monotonic()
        with self._changed:
            self._due_s = begin_s + limit_s
            self._changed.notify()
        try:
            yield
        finally:
            self._due_s = None  # the thread sees it when that time has come
        self._patience.took(slices, time.monotonic() - begin_s)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        with self._changed:
            while not self._is_closed:
                due_s = self._due_s
                if due_s is None:
                    self._changed.wait()
                elif (left_s := due_s - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    _log.error("a step hangs: this process ends, and is started again")
                    self._due_s = None
                    self._end()
