"""Stores that run one after another in a thread of their own, and their results in the same order, for SGLang to poll.

Owns the thread. A store that raises is a store that failed. Knows nothing of what is stored.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from queue import Empty, Queue

log = logging.getLogger(__name__)


class Offloads:
    """`close` ends it."""

    def __init__(self) -> None:
        self._work: Queue[Callable[[], bool] | None] = Queue()
        self._results: Queue[bool] = Queue()
        self._thread = threading.Thread(target=self._run, name="kvstore-offload", daemon=True)
        self._thread.start()

    def put(self, store: Callable[[], bool]) -> None:
        self._work.put(store)

    def completed(self) -> int:
        """Results that wait to be taken."""
        return self._results.qsize()

    def pop(self) -> bool:
        """The oldest result. Raises queue.Empty where there is none."""
        return self._results.get_nowait()

    def settle(self) -> None:
        """Wait until all that was given has been stored, and forget the results."""
        self._work.join()
        with contextlib.suppress(Empty):
            while True:
                self._results.get_nowait()

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self.settle()
            self._work.put(None)
            self._thread.join()

    def _run(self) -> None:
        while (store := self._work.get()) is not None:
            is_stored = False
            try:
                is_stored = store()
            except Exception:
                log.exception("pages could not be stored")
            self._results.put(is_stored)
            self._work.task_done()
