"""Stores full blocks of many sequences, and sends hints, in a thread beside the engine's.

The module owns that thread and its puts. It does not allocate or free pool blocks: the caller keeps the blocks of a put
allocated and unchanged until `finished` has returned it. Nothing here can fail a request.

A put waits for the daemon, and a step must not. But on a machine without idle cores, copying beside ggml's spinning
threads slows both, so the engine hands over one put between two steps and waits briefly for it (`settle`). If the
daemon has not answered by then, the next call does not wait.
"""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvstore_client.trace import traced
from kvstore_engine.restore.fingerprint import WINDOW_GROUP
from kvstore_engine.restore.session import KvSession, NextStep, Payload, Tokens

_log = logging.getLogger(__name__)
MOST_BLOCKS = 4  # storage blocks in a put: large enough to spread the round trip, a few milliseconds long
_MOST_WAITING = 64
_MOST_HINTS, _MOST_DUE = 256, 64  # hints that wait beside them; further ones are dropped


class BlockSender(Protocol):
    """An object that can write blocks of the pool into the daemon's memory, to store them; see `PoolCopies.payload`."""

    def payload(self, table: list[int]) -> Payload: ...


@dataclass(slots=True, eq=False)
class QueuedPut:
    """A request to store blocks in the daemon: the storage blocks of the sequence `tokens` from number `first_block`
    on, each in the pool blocks of one of `tables`. `windows` has the payloads of layers with a sliding window by block
    number. `trace` is the caller's traceparent, or "". `statuses` and `failure` are set when the request has ended.
    """

    session: KvSession
    tokens: Tokens
    first_block: int
    tables: list[list[int]]
    windows: dict[int, Payload] = field(default_factory=dict)
    begin_s: float = 0.0
    end_s: float = 0.0
    trace: str = ""
    statuses: Sequence[str] = field(default=())
    failure: str = ""

    @property
    def reason(self) -> str:
        """The reason why not all blocks of this put (a request to store blocks) were stored; "" if all were."""
        if self.failure:
            return self.failure
        if not self.statuses:
            return "given up: the engine was closed first"
        lost = next((at for at, status in enumerate(self.statuses) if status not in ("stored", "present")), None)
        if lost is None:
            return ""
        # A prefix is found only up to its first gap: blocks after one would be stored in vain.
        return f"block {self.first_block + lost} was {self.statuses[lost]}; later ones are not stored"


@dataclass(slots=True, eq=False)
class QueuedHint:
    """A hint for the daemon's eviction about the whole blocks of `tokens`: an answer of `answer_tokens` tokens has
    ended with them, or a waiting request needs them in about `due_in_s` seconds. `next_step` is called when the hint is
    sent, and returns which request will follow the answer.
    """

    session: KvSession
    tokens: Tokens
    answer_tokens: int = 0
    due_in_s: float | None = None
    next_step: Callable[[], NextStep | None] | None = None


class PutQueue:
    """A queue of puts (requests to store blocks) and hints, which a thread sends to the daemon one after another.
    `copies` reads the blocks from the pool.
    """

    def __init__(self, copies: BlockSender, clock: Callable[[], float] = time.perf_counter) -> None:
        self._copies = copies
        self._clock = clock
        self._waiting: deque[QueuedPut | QueuedHint] = deque()
        self._work: queue.SimpleQueue[QueuedPut | QueuedHint | None] = queue.SimpleQueue()  # None ends the worker
        self._done: queue.SimpleQueue[QueuedPut] = queue.SimpleQueue()
        self._puts = 0  # that wait
        self._handed = 0
        self._is_patient = True
        self._idle = threading.Event()
        self._idle.set()
        self._thread: threading.Thread | None = None
        self.counts: Counter[str] = Counter()

    @property
    def outstanding(self) -> int:
        """The number of puts (requests to store blocks) that were offered and that `finished` has not returned yet."""
        return self._puts + self._handed

    @property
    def is_full(self) -> bool:
        """True if the queue is long, so that the caller should offer no more puts (requests to store blocks) for
        now.
        """
        return self._puts >= _MOST_WAITING

    def offer(self, put: QueuedPut) -> None:
        """Add `put`, a request to store blocks, to the queue. A later `settle` passes it to the thread."""
        self._waiting.append(put)
        self._puts += 1

    def hint(self, hint: QueuedHint) -> None:
        """Add `hint` to the queue, behind the puts of its blocks. The hint is dropped if too many hints wait."""
        if len(self._waiting) - self._puts < (_MOST_HINTS if hint.due_in_s is None else _MOST_DUE):
            self._waiting.append(hint)

    def settle(self, patience_s: float, *, everything: bool = False) -> None:
        """Pass the next put (a request to store blocks) to the thread if the thread is idle, and wait up to
        `patience_s` seconds for its end. With `everything` all puts are passed.
        """
        if not self._idle.is_set() and not everything:
            self._is_patient = False
            return
        if not self._waiting:
            return
        is_patient, self._is_patient = self._is_patient, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvengine-put", daemon=True)
            self._thread.start()
        self._idle.clear()
        has_put = False
        while self._waiting:
            is_put = isinstance(self._waiting[0], QueuedPut)
            if is_put and has_put and not everything:
                break
            has_put |= is_put
            self._puts -= is_put
            self._handed += is_put
            self._work.put(self._waiting.popleft())
        if is_patient:
            self._idle.wait(patience_s)

    def finished(self) -> list[QueuedPut]:
        """Return the puts (requests to store blocks) that have ended since the last call. The caller may free their
        pool blocks.
        """
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except queue.Empty:
                break
        self._handed -= len(done)
        for put in done:
            self.counts.update(put.statuses)
        return done

    def wait(self, timeout_s: float) -> None:
        """Wait, at most `timeout_s` seconds, until the thread has sent everything that it has got."""
        self._idle.wait(timeout_s)

    def close(self) -> list[QueuedPut]:
        """Finish the puts (requests to store blocks) that the thread has got, give up the ones still in the queue, and
        end the thread. Return all puts whose pool blocks may be freed.
        """
        given_up = [each for each in self._waiting if isinstance(each, QueuedPut)]
        self._waiting.clear()
        self._puts = 0
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        return [*self.finished(), *given_up]

    def _run(self) -> None:
        while (each := self._work.get()) is not None:
            if isinstance(each, QueuedPut):
                self._store(each)
            else:
                self._send(each)
            if self._work.empty():
                self._idle.set()

    def _store(self, put: QueuedPut) -> None:
        put.begin_s = self._clock()
        try:
            payloads = [self._copies.payload(table) for table in put.tables]
            with traced(put.trace):
                put.statuses = put.session.put(put.tokens, first_block=put.first_block, payloads=payloads).statuses
                self._store_windows(put)
        except Exception as error:  # a failure to store must not end an answer, nor this thread
            put.failure = f"storing failed: {type(error).__name__}: {error}"
        put.end_s = self._clock()
        self._done.put(put)

    def _store_windows(self, put: QueuedPut) -> None:
        """Store what `windows` has, run by run."""
        size, run = put.session.block_tokens, list[Payload]()
        for block in sorted(put.windows):
            run.append(put.windows[block])
            if block + 1 not in put.windows:
                tokens, first = put.tokens[: (block + 1) * size], block + 1 - len(run)
                receipt = put.session.put(tokens, first_block=first, payloads=run, group=WINDOW_GROUP)
                self.counts.update(f"window_{status}" for status in receipt.statuses)
                run = []

    def _send(self, each: QueuedHint) -> None:
        try:
            step = None if each.next_step is None else each.next_step()
            each.session.hint(each.tokens, answer_tokens=each.answer_tokens, due_in_s=each.due_in_s, next_step=step)
        except Exception as error:  # as above
            _log.debug("a hint was not sent: %s: %s", type(error).__name__, error)
