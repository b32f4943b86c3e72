"""Requests leases on stored prefixes, in threads beside the engine's.

Owns a few threads that wait for the daemon. It never touches the pool: the engine's thread copies what is under a lease
between two steps, and releases it. No error here fails a request: it is an answer without a lease.
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
    """One request. Once `done`, `lease` is entered, for the engine to exit, or None with the `failure`. `due_s`: when
    the answer is due, unless it waits for a thread.
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
    """Waits for up to four answers at a time; further requests are queued."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def request(
        self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, promote: bool
    ) -> Fetch:
        """Start `session.get` with these arguments; `tokens` must not change afterwards."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="kvengine-fetch")
        now = self._clock()
        fetch = Fetch(now, now + deadline_s)
        self._threads.submit(self._run, fetch, session, tokens, max_blocks, deadline_s, promote)
        return fetch

    def drop(self, fetch: Fetch) -> None:
        """Discard the answer, and release its lease when it comes."""
        with self._changed:
            fetch.is_dropped = True
            if not fetch.done:
                return
        fetch.release()

    def wait(self, fetches: list[Fetch], timeout_s: float) -> None:
        """Wait until one of `fetches` is done, or for `timeout_s`."""
        with self._changed:
            self._changed.wait_for(lambda: any(fetch.done for fetch in fetches), timeout_s)

    def close(self) -> None:
        """Wait for the threads; each request has a deadline."""
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
            except Exception as error:  # a failure to restore must not fail an answer, nor end this thread
                failure = f"restoring failed: {type(error).__name__}: {error}"
        with self._changed:
            fetch.lease, fetch.failure = lease, failure
            fetch.seconds = self._clock() - fetch.begun_s
            fetch.done = True
            is_dropped = fetch.is_dropped
            self._changed.notify_all()
        if is_dropped:
            fetch.release()
