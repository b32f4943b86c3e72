"""Asks the daemon for prefixes, off the engine's thread.

Owns a few threads that wait for answers. It never touches the pool: leases are handed to the engine's thread, which
copies between two steps and releases them. Nothing that goes wrong here can fail a request: it is an answer without a
lease.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from kvstore_engine.restore.session import KvLease, KvSession, Tokens

_THREADS = 4


@dataclass(slots=True, eq=False)
class Fetch:
    """One question. Once `done`, `lease` is entered and the engine's to exit, or None with the `failure`. `due_s`: when
    it should be done, had it not waited for a thread.
    """

    begun_s: float
    due_s: float
    done: bool = False
    lease: KvLease | None = None
    failure: str = ""
    seconds: float = 0.0
    is_dropped: bool = False

    def release(self) -> None:
        """End the lease, if there is one."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.__exit__(None, None, None)


class Fetcher:
    """Up to four questions at a time; others wait their turn."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def ask(self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, promote: bool) -> Fetch:
        """Start `session.get` with these arguments; `tokens` must not change any more."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvengine-fetch")
        now = self._clock()
        fetch = Fetch(now, now + deadline_s)
        self._threads.submit(self._run, fetch, session, tokens, max_blocks, deadline_s, promote)
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """Nobody wants the answer any more."""
        with self._changed:
            fetch.is_dropped = True
            if not fetch.done:
                return
        fetch.release()

    def wait(self, fetches: list[Fetch], timeout_s: float) -> None:
        """Until one of `fetches` is done, or `timeout_s` have passed."""
        with self._changed:
            self._changed.wait_for(lambda: any(fetch.done for fetch in fetches), timeout_s)

    def close(self) -> None:
        """Wait for the threads; each question has a deadline."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _run(
        self, fetch: Fetch, session: KvSession, tokens: Tokens, max_blocks: int, deadline_s: float, promote: bool
    ) -> None:
        lease, failure = None, ""
        if not fetch.is_dropped:
            try:
                lease = session.get(tokens, max_blocks=max_blocks, deadline_s=deadline_s, promote=promote).__enter__()
            except Exception as error:  # the thread's end: a request must not fail by its store
                failure = f"restoring failed: {type(error).__name__}: {error}"
        with self._changed:
            fetch.lease, fetch.failure = lease, failure
            fetch.seconds = self._clock() - fetch.begun_s
            fetch.done = True
            is_dropped = fetch.is_dropped
            self._changed.notify_all()
        if is_dropped:
            fetch.release()
