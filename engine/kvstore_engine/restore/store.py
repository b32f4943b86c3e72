"""Stores full blocks of a running request, off the generating thread.

Owns one worker thread and the queue to it. It never allocates or frees pool blocks, and nothing it does can
fail a request: what cannot be stored is counted and left.

Obligations of the caller: a block is announced (`advance`) only once all its tokens have been computed, which
never changes it again; the request's pool blocks stay allocated until `finish` has returned. In return no
bytes are read from the pool after `finish`, so that a reused block can never be published under another
prefix's key.

Why a thread, and why it is waited for: a put waits for the daemon, and a decode step must not. But copying
beside ggml's spinning threads slows both several times over on a machine without idle cores. So each
`advance` hands the worker one batch and waits briefly for it: storing falls between two steps, and only a
slow daemon is overtaken."""

import queue
import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from kvstore_engine.restore.session import Bytes, KvSession, Tokens

BlockIds = Sequence[int]

_BATCH_BLOCKS = 4  # one put, between two steps: large enough to spread the round trip, a few milliseconds long
_PATIENCE_S = 0.01


class BlockSender(Protocol):
    """The part of the block pool that gives blocks out."""

    @property
    def block_tokens(self) -> int: ...
    def gather_block(self, block_ids: BlockIds, dest: Bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What became of a request's blocks. `store_s` is the time in puts, which generation did not wait for."""

    stored: int = 0
    present: int = 0
    throttled: int = 0
    failed: int = 0
    store_s: float = 0.0
    reason: str = ""


@dataclass(slots=True)
class _Request:
    """One request's progress. `wanted_blocks` grows in the generating thread, the rest belongs to the
    worker.
    """

    block_table: BlockIds
    tokens: Tokens
    wanted_blocks: int
    done_blocks: int
    statuses: Counter[str] = field(default_factory=Counter)
    store_s: float = 0.0
    reason: str = ""

    @property
    def is_waiting(self) -> bool:
        """Blocks are announced and neither stored nor given up. Only while the worker is idle."""
        return self.done_blocks < self.wanted_blocks and not self.reason


class BlockStore:
    """Stores the blocks of one request at a time: `begin`, `advance` as tokens are computed, `finish`."""

    def __init__(self, session: KvSession, pool: BlockSender) -> None:
        self._session = session
        self._pool = pool
        self._request: _Request | None = None
        self._work: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()  # None ends the worker
        self._idle = threading.Event()  # while set, the worker touches nothing and the request is ours
        self._idle.set()
        self._thread: threading.Thread | None = None

    def begin(self, block_table: BlockIds, restored_tokens: int) -> None:
        """A request starts whose K/V lies in `block_table`; `restored_tokens` of it came from the store."""
        assert self._request is None, "finish() the previous request first"
        done = restored_tokens // self._session.block_tokens
        self._request = _Request(block_table, np.empty(0, np.int32), done, done)

    def advance(self, tokens: Tokens) -> None:
        """`tokens` (int32 [n], the whole sequence so far) are computed; stores some of the full blocks.

        Call it after every step, also one that fills no block: earlier blocks may still wait for their turn.
        """
        request = self._request
        assert request is not None, "begin() first"
        full = len(tokens) // self._session.block_tokens
        if full * self._session.block_tokens > len(request.tokens):
            # The worker may be reading the old array: it is replaced, never changed.
            request.tokens = np.array(tokens[: full * self._session.block_tokens], np.int32)
        request.wanted_blocks = max(request.wanted_blocks, full)
        if self._idle.is_set() and request.is_waiting:
            self._hand_over(request)
            self._idle.wait(_PATIENCE_S)

    def finish(self, answer_tokens: int = 0) -> StoreReport:
        """Store what is left, or give it up, and report. Each put's deadline bounds the wait. An answer of so many
        tokens has ended: the daemon is told.
        """
        request = self._request
        if request is None:
            return StoreReport()
        self._request = None
        self._idle.wait()
        while request.is_waiting:
            self._hand_over(request)
            self._idle.wait()
        if answer_tokens and len(request.tokens):
            with suppress(Exception):  # whatever the client does wrong, the answer is there
                self._session.hint(request.tokens, answer_tokens=answer_tokens)
        counts = request.statuses
        return StoreReport(
            stored=counts["stored"],
            present=counts["present"],
            throttled=counts["throttled"],
            failed=counts["failed"],
            store_s=request.store_s,
            reason=request.reason,
        )

    def close(self) -> None:
        """Stop the worker."""
        self.finish()
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None

    def _hand_over(self, request: _Request) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvengine-store", daemon=True)
            self._thread.start()
        self._idle.clear()
        self._work.put(request)

    def _run(self) -> None:
        while (request := self._work.get()) is not None:
            begin = time.perf_counter()
            try:
                self._put_batch(request)
            except Exception as error:  # the thread's end: a bug in storing must not end the answer
                request.reason = f"storing failed: {type(error).__name__}: {error}"
            request.store_s += time.perf_counter() - begin
            self._idle.set()

    def _put_batch(self, request: _Request) -> None:
        first = request.done_blocks
        count = min(request.wanted_blocks - first, _BATCH_BLOCKS)
        tokens = request.tokens[: (first + count) * self._session.block_tokens]
        payloads = [partial(self._gather, request.block_table, first + index) for index in range(count)]
        statuses = self._session.put(tokens, first_block=first, payloads=payloads).statuses
        request.statuses.update(statuses)
        request.done_blocks += count
        lost = next((status for status in statuses if status not in ("stored", "present")), None)
        if lost is not None:
            # A prefix is found only up to its first gap: blocks after one would be stored in vain.
            request.reason = f"block {first + list(statuses).index(lost)} was {lost}; later ones are not stored"

    def _gather(self, block_table: BlockIds, block: int, dest: Bytes) -> None:
        per_block = self._session.block_tokens // self._pool.block_tokens
        self._pool.gather_block(block_table[block * per_block : (block + 1) * per_block], dest)
