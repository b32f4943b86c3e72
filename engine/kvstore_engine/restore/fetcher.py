"""Requests leases on stored prefixes, in threads beside the engine's.

The module owns a few threads that wait for the daemon. It does not touch the pool: the engine's thread copies leased
blocks between two steps, and releases the lease. No error here fails a request: it becomes an answer without a lease.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvstore_engine.restore.fingerprint import WINDOW_GROUP
from kvstore_engine.restore.session import KvLease, KvSession, KvStream, Tokens
from kvstore_proto.fingerprint import LayerGroup

_THREADS = 4
Order = Literal["front", "back"]


@dataclass(slots=True, eq=False)
class Fetch:
    """One lookup with the lease that it got. Once `done`, `lease` is on the leading blocks that are mapped, for the
    engine to release, or None with the `failure`. If some are not mapped, `tiers` has the tier of each resident block,
    and `estimated_load_s` the daemon's estimate for mapping them, in seconds. `due_s`: when the answer is due, unless
    it waits for a thread. Where windowed layers have blocks of their own, `lease` ends where both can resume, `window`
    is on their blocks there, from number `window_first` on, and without both there is the `reason`.
    """

    begun_s: float
    due_s: float
    done: bool = False
    lease: KvLease | None = None
    tiers: tuple[str, ...] = ()
    estimated_load_s: float = 0.0
    failure: str = ""
    seconds: float = 0.0
    is_dropped: bool = False
    window: KvLease | None = None
    window_first: int = 0
    reason: str = ""

    @property
    def has_news(self) -> bool:
        return self.done

    def release(self) -> None:
        """End the lease, if there is one; the one of windows goes on."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.__exit__(None, None, None)

    def close(self) -> None:
        """End all leases."""
        self.release()
        window, self.window = self.window, None
        if window is not None:
            window.__exit__(None, None, None)


@dataclass(slots=True)
class ArrivedBlocks:
    """Blocks first, first + 1, … of a prefix, readable since `at_s`. `copied`: the number of leading ones that need no
    more work.
    """

    first: int
    lease: KvLease
    at_s: float
    copied: int = 0


@dataclass(slots=True, eq=False)
class BlockStream:
    """Blocks of one prefix on their way, in some order. `arrived`: the blocks that the engine has not taken yet.
    `tiers`: where each block was, known once the daemon has answered. Once `done`, no more arrive; `reason` says
    why.
    """

    begun_s: float
    arrived: list[ArrivedBlocks] = field(default_factory=list)
    tiers: tuple[str, ...] = ()
    done: bool = False
    reason: str = ""
    source: KvStream | None = None
    is_dropped: bool = False

    @property
    def has_news(self) -> bool:
        return self.done or bool(self.arrived)


class Awaited(Protocol):
    """An answer that `Fetcher.wait` waits for."""

    @property
    def has_news(self) -> bool: ...


class Fetcher:
    """The threads that wait for the daemon, for up to `threads` answers at a time; further requests are queued."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, threads: int = _THREADS) -> None:
        self._clock = clock
        self._count = threads
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def request(
        self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, window_tokens: int = 0
    ) -> Fetch:
        """Start a lookup of the first `max_blocks` blocks of `tokens`, which must not change afterwards.
        `window_tokens`: of windowed layers that have blocks of their own.
        """
        now = self._clock()
        fetch = Fetch(now, now + deadline_s)
        self._pool().submit(self._look_up, fetch, session, tokens, max_blocks, deadline_s, window_tokens)
        return fetch

    def stream(
        self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, order: Order = "back"
    ) -> BlockStream:
        """Start to load the first `max_blocks` blocks of `tokens`, by default from the last one down."""
        stream = BlockStream(self._clock())
        self._pool().submit(self._load, stream, session, tokens, max_blocks, deadline_s, order)
        return stream

    def take(self, stream: BlockStream) -> list[ArrivedBlocks]:
        """Return the blocks that have arrived since the last call."""
        with self._changed:
            arrived, stream.arrived = stream.arrived, []
        return arrived

    def drop(self, dropped: Fetch | BlockStream) -> None:
        """Discard the answers, and release their leases, also of later answers."""
        with self._changed:
            dropped.is_dropped = True
            source = dropped.source if isinstance(dropped, BlockStream) else None
            is_lookup_done = isinstance(dropped, Fetch) and dropped.done
        if source is not None:
            source.close()
        if is_lookup_done and isinstance(dropped, Fetch):
            dropped.close()

    def wait(self, awaited: Iterable[Awaited], timeout_s: float) -> None:
        """Wait until one of `awaited` has news, or for `timeout_s` seconds. The caller can also end the wait with
        `notify`.
        """
        known = list(awaited)
        with self._changed:
            self._changed.wait_for(lambda: any(each.has_news for each in known), timeout_s)

    def notify(self) -> None:
        """Wake waiting threads."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Wait for the threads; each request has a deadline."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None

    def _pool(self) -> ThreadPoolExecutor:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix="kvengine-fetch")
        return self._threads

    def _look_up(
        self,
        fetch: Fetch,
        session: KvSession,
        tokens: Tokens,
        max_blocks: int,
        deadline_s: float,
        window_tokens: int,
    ) -> None:
        failure = ""
        if not fetch.is_dropped:
            try:
                if window_tokens:
                    max_blocks = look_up_window(fetch, session, tokens, max_blocks, deadline_s, window_tokens)
                if max_blocks:
                    look_up_prefix(fetch, session, tokens, max_blocks, deadline_s)
            except Exception as error:  # a failure to restore must not fail an answer, nor end this thread
                failure = f"restoring failed: {type(error).__name__}: {error}"
        with self._changed:
            fetch.failure, fetch.seconds = failure, self._clock() - fetch.begun_s
            fetch.done = True
            is_dropped = fetch.is_dropped
            self._changed.notify_all()
        if is_dropped:
            fetch.close()

    def _load(
        self,
        stream: BlockStream,
        session: KvSession,
        tokens: Tokens,
        max_blocks: int,
        deadline_s: float,
        order: Order,
    ) -> None:
        source, reason = None, ""
        try:
            if not stream.is_dropped:
                source = session.get_stream(tokens, order=order, max_blocks=max_blocks, deadline_s=deadline_s)
                with self._changed:
                    stream.source = source
                if stream.is_dropped:
                    source.close()
                for first, lease in source:
                    with self._changed:
                        stream.tiers = source.tiers
                        stream.arrived.append(ArrivedBlocks(first, lease, self._clock()))
                        self._changed.notify_all()
                reason = source.reason
        except Exception as error:  # as above
            reason = f"loading failed: {type(error).__name__}: {error}"
        with self._changed:
            stream.done, stream.reason = True, reason
            self._changed.notify_all()


def look_up_prefix(fetch: Fetch, session: KvSession, tokens: Tokens, max_blocks: int, deadline_s: float) -> None:
    """Let `fetch` have the lease on the leading blocks that are mapped, and the tiers of the others. One that has a
    window needs all `max_blocks` blocks.
    """
    size = session.block_tokens
    lease = session.get(tokens, max_blocks=max_blocks, deadline_s=deadline_s, promote=False).__enter__()
    fetch.lease, fetch.estimated_load_s = lease, lease.estimated_load_s
    if fetch.window is not None and lease.resident_blocks < max_blocks:
        fetch.reason = str(lease.reason) or "evicted"
        fetch.close()
    elif len(lease) < lease.resident_blocks:
        known = tokens[: max_blocks * size]
        fetch.tiers = session.lookup(known, deadline_s=deadline_s).tiers[: lease.resident_blocks]


def look_up_window(
    fetch: Fetch, session: KvSession, tokens: Tokens, max_blocks: int, deadline_s: float, window_tokens: int
) -> int:
    """Let `fetch` have the lease on the blocks of windowed layers with which the longest prefix that is stored can be
    resumed. Return the number of blocks of that prefix.
    """
    point, size = session.resume_point(tokens, max_blocks=max_blocks, deadline_s=deadline_s), session.block_tokens
    fetch.reason = str(point.reason)
    if not point.blocks:
        return 0
    needed = LayerGroup(WINDOW_GROUP, "sliding", window_tokens).needed_blocks(point.blocks, size)
    fetch.window_first, wanted = needed.start, len(needed)
    fetch.window = session.get(
        tokens,
        first_block=fetch.window_first,
        max_blocks=wanted,
        group=WINDOW_GROUP,
        deadline_s=deadline_s,
        promote=True,
    ).__enter__()
    if len(fetch.window) == wanted:
        return point.blocks
    fetch.reason = str(fetch.window.reason) or "evicted"
    fetch.close()
    return 0
