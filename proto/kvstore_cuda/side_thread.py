"""A resident thread that takes part in work of other threads, so that a large copy has two processors.

The module owns the thread. It begins with the first work, and serves one call at a time, in the order of the calls. A
caller does not wait for it to begin: a caller that is ready first has done all the work. So the thread is of use where
a processor is idle, and costs some microseconds where none is.

Invariants: when a call of `together` ends, no thread works for it any more; a forked child, which has no such thread,
gets one of its own.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

Work = Callable[[], None]
NAME = "kvstore-side"
SHARED_BYTES = 2 << 20  # a copy of so much is worth another thread's help


def together(work: Work, nbytes: int) -> None:
    """Call `work`, which copies `nbytes` bytes, in this thread, and if they are many, also in the side thread, unless
    that is busy until this call has ended. Return when both have ended. The two calls of `work` share what is to do,
    and a call returns when nothing is left. Raises what either call raises.
    """
    queue = _queue(os.getpid()) if nbytes >= SHARED_BYTES else None
    if queue is None:
        work()
        return
    share = _Share(work)
    queue.put(share)
    try:
        work()
    finally:
        share.end()
    if share.error is not None:
        raise share.error


class _Share:
    """The side thread's share of `work`. It is not begun once the caller has called `end`."""

    def __init__(self, work: Work) -> None:
        self._work: Work | None = work
        self._taking, self._ended = threading.Lock(), threading.Lock()
        self._ended.acquire()
        self.error: BaseException | None = None

    def run(self) -> None:
        with self._taking:
            work, self._work = self._work, None
        if work is None:
            return
        try:
            work()
        except BaseException as error:  # the caller raises it
            self.error = error
        finally:
            self._ended.release()

    def end(self) -> None:
        """Wait for the side thread if it has begun, even if this thread is interrupted meanwhile."""
        with self._taking:
            work, self._work = self._work, None
        if work is not None:
            return
        try:
            self._ended.acquire()
        except BaseException:
            self._ended.acquire()
            raise


@functools.cache
def _queue(process: int) -> SimpleQueue[_Share] | None:
    """Return the queue of the side thread of this process, which has the number `process`; None if the process may use
    one processor only, or can have no more threads.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return None
    queue = SimpleQueue[_Share]()
    try:
        threading.Thread(target=_serve, args=(queue,), name=NAME, daemon=True).start()
    except RuntimeError:
        return None
    return queue


def _serve(queue: SimpleQueue[_Share]) -> None:
    while True:
        queue.get().run()
