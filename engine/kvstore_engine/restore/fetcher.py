"""Requests leases on stored prefixes, in threads beside the engine's.

The module owns a few threads that wait for the daemon. It does not touch the pool: the engine's thread copies leased
blocks between two steps, and releases the lease. No error here fails a request: it becomes an answer without a lease.
"""

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvstore_engine.restore.fingerprint import WINDOW_GROUP
from kvstore_engine.restore.session import KvLease, KvSession, KvStream, Tokens
from kvstore_proto.fingerprint import LayerGroup

_THREADS = 4
Order = Literal["front", "back"]


@dataclass(slots=True, eq=False)
class Fetch:
    """The state of one lookup of a prefix in the daemon. Once `done`, `lease` covers the leading blocks that are
    mapped, or is None with the reason in `failure`. If later blocks are in slower tiers, `tiers` has the tier of each
    block, and `estimated_load_s` is the daemon's estimate for loading them, in seconds. `due_s` is when the answer is
    due. For layers with a sliding window, `window` is the lease on their blocks from number `window_first` on; without
    it, `reason` says why.
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
        """End the lease on the blocks of all layers, if there is one. The lease `window` on blocks of windowed layers
        goes on.
        """
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.__exit__(None, None, None)

    def close(self) -> None:
        """End both leases, on blocks of all layers and on blocks of windowed layers, if there are any."""
        self.release()
        window, self.window = self.window, None
        if window is not None:
            window.__exit__(None, None, None)


@dataclass(slots=True)
class ArrivedBlocks:
    """Blocks of a prefix, from number `first` on, that became readable at the time `at_s` (seconds) and are leased by
    `lease`. The first `copied` of them need not be copied any more.
    """

    first: int
    lease: KvLease
    at_s: float
    copied: int = 0


@dataclass(slots=True, eq=False)
class BlockStream:
    """Blocks of one prefix that the daemon loads from slower tiers, one after another. `arrived` has the blocks that
    the engine has not taken yet; `tiers` has the tier of each block, once the daemon has answered. Once `done`, no more
    arrive, and `reason` says why.
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
    """A lookup or a stream of blocks for which `Fetcher.wait` can wait. `has_news` is True if something has arrived, or
    if it has ended.
    """

    @property
    def has_news(self) -> bool: ...


class Fetcher:
    """A pool of `threads` threads that ask the daemon for stored blocks and wait for its answers. Further requests wait
    in a queue.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter, threads: int = _THREADS) -> None:
        self._clock = clock
        self._count = threads
        self._threads: ThreadPoolExecutor | None = None
        self._changed = threading.Condition()

    def warm_up(self, session: KvSession) -> None:
        """Start a thread and ping the daemon in it, so that the first request of `session` waits for no set-up."""
        self._pool().submit(session.ping).result()

    def request(
        self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, window_tokens: int = 0
    ) -> Fetch:
        """Start to look up the first `max_blocks` blocks of `tokens` in `session`, and return an object that will have
        the result. The lookup may take `deadline_s` seconds. `window_tokens` is the window of layers whose blocks are
        stored apart, 0 if there are none. The array `tokens` must not be changed afterwards.
        """
        now = self._clock()
        fetch = Fetch(now, now + deadline_s)
        self._pool().submit(
            copy_context().run, self._look_up, fetch, session, tokens, max_blocks, deadline_s, window_tokens
        )
        return fetch

    def stream(
        self, session: KvSession, tokens: Tokens, *, max_blocks: int, deadline_s: float, order: Order = "back"
    ) -> BlockStream:
        """Start to load the first `max_blocks` blocks of `tokens` from slower tiers, and return an object that receives
        them. It may take `deadline_s` seconds. With `order` "back" the last block is loaded first.
        """
        stream = BlockStream(self._clock())
        self._pool().submit(copy_context().run, self._load, stream, session, tokens, max_blocks, deadline_s, order)
        return stream

    def take(self, stream: BlockStream) -> list[ArrivedBlocks]:
        """Return the blocks of `stream` that have arrived since the last call."""
        with self._changed:
            arrived, stream.arrived = stream.arrived, []
        return arrived

    def drop(self, dropped: Fetch | BlockStream) -> None:
        """Discard the lookup or stream `dropped`, and release its leases, also the ones that arrive later."""
        with self._changed:
            dropped.is_dropped = True
            source = dropped.source if isinstance(dropped, BlockStream) else None
            is_lookup_done = isinstance(dropped, Fetch) and dropped.done
        if source is not None:
            source.close()
        if is_lookup_done and isinstance(dropped, Fetch):
            dropped.close()

    def wait(self, awaited: Iterable[Awaited], timeout_s: float) -> None:
        """Wait, at most `timeout_s` seconds, until something of `awaited` has news (an answer, a block or its end), or
        until `notify` is called.
        """
        known = list(awaited)
        with self._changed:
            self._changed.wait_for(lambda: any(each.has_news for each in known), timeout_s)

    def notify(self) -> None:
        """Wake the threads that are in `wait`, so that they return."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        """Drop queued requests and wait until the threads have ended. Each request that runs has a time limit."""
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
    """Look up the first `max_blocks` blocks of `tokens`. `fetch` gets the lease on the mapped blocks and the tiers of
    the others. If `fetch` has a lease on blocks of windowed layers already, all `max_blocks` blocks must be stored;
    otherwise all its leases are ended, with the reason in `fetch`.
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
    """Find the longest stored prefix of `tokens` after which layers with a window of `window_tokens` tokens can go on
    computing, and give `fetch` the lease on these layers' blocks. Return the number of blocks of that prefix; 0 if
    there is none, with the reason in `fetch`.
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
