"""Store filled blocks beside the running engine, and release pool blocks before vLLM gives them to others.

The module owns one thread and the orders that wait for it. A put waits for the daemon, and on a device for the step
that fills the blocks, and a step of the model must not wait; so the thread copies out of the pool while the engine goes
on. Filled blocks never change while their request holds them. When a request ended, `let_go` waits a little for its
copies and then cuts them off: a dropped save is a later miss. The same holds for blocks that a running request gave up;
these are copied before others. A block that could not be stored (no daemon, no room) is tried again with the request's
next order, unless it leaves the pool while the request runs. Invariants: after `let_go` returns no byte of those pool
blocks is read; nothing here raises into the engine; of a group that stays in the pool, a block is stored only behind
the one before it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

from kvstore_client.memory import Bytes
from kvstore_client.receipt import PRESENT, STORED
from kvstore_client.session import Session
from kvstore_client.trace import traced
from kvstore_connectors.engine_session import SayOnce
from kvstore_connectors.moments import Moment
from kvstore_connectors.vllm.identity import address
from kvstore_connectors.vllm.orders import Place, SaveOrder
from kvstore_connectors.vllm.pages import Pages
from kvstore_proto.errors import KVStoreError

_GRACE_S = 0.01


class _CutOff(Exception):
    """Raised inside a put whose pool blocks were taken back."""


class _Job:
    """One order under way, for blocks that are filled at the moment `after`. The lock is held while a block is copied:
    cutting off waits for that copy alone.
    """

    def __init__(self, order: SaveOrder, after: Moment) -> None:
        self.order, self.after = order, after
        self.slot = (order.request_id, order.group)
        self.blocks = len(order.block_ids) - order.first_block
        self.copied = threading.Event()
        self.is_copying = False  # the daemon has answered
        self.is_last = False  # its request has ended
        self._left = self.blocks
        self._lock = threading.Lock()
        self._cut = False

    def reads(self, block_ids: Collection[int]) -> bool:
        """Return whether one of these pool blocks is still to be copied, perhaps."""
        if self.copied.is_set():
            return False
        places = self.order.block_ids[self.order.first_block :]
        return any(not isinstance(place, int) and not set(block_ids).isdisjoint(place) for place in places)

    def copy(self, pages: Pages, block_id: Place, destination: Bytes) -> None:
        with self._lock:
            if self._cut:
                raise _CutOff
            self.is_copying = True
            pages.gather(block_id, destination)
        self._left -= 1
        if not self._left:
            self.copied.set()

    def cut(self) -> None:
        with self._lock:
            self._cut = True


class Saver:
    """A thread that stores the blocks that vLLM has filled, while the engine goes on. A put takes at most `deadline_s`
    seconds. `say` is called with at most one sentence for each kind of trouble.
    """

    def __init__(
        self,
        session: Session,
        pages: Pages,
        *,
        deadline_s: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._pages = session, pages
        self._deadline_s = deadline_s
        self._say = SayOnce(say)
        self._clock = clock
        self._wake = threading.Condition()
        self._waiting: deque[_Job] = deque()
        self._leaving: deque[_Job] = deque()  # before the others: blocks that soon leave the pool
        self._open: dict[str, list[_Job]] = {}  # by request: waiting or being stored
        # Of running requests, by group: the first block that an earlier order could not store.
        self._gaps: dict[tuple[str, int], int] = {}
        self._thread: threading.Thread | None = None
        self._closing = False
        self.stored_blocks = 0
        self.dropped_blocks = 0

    def submit(self, order: SaveOrder, after: Moment) -> None:
        """Queue `order`, an order to store blocks, and return at once. Blocks that an earlier order of the request
        could not store are tried again. The blocks are filled at the moment `after`, and are not read before.
        """
        with self._wake:
            first = min(order.first_block, self._gaps.pop((order.request_id, order.group), order.first_block))
            job = _Job(replace(order, first_block=first), after)
            if self._closing:
                self.dropped_blocks += job.blocks
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-vllm-save", daemon=True)
                self._thread.start()
            (self._waiting if order.stays else self._leaving).append(job)
            self._open.setdefault(order.request_id, []).append(job)
            self._wake.notify()

    def let_go(self, request_ids: Collection[str], patience_s: float, released: Collection[int] = ()) -> None:
        """Stop reading the pool blocks of the requests `request_ids`, and the pool blocks `released` of other requests,
        because vLLM gives them to others. Wait for their copies first, at most `patience_s` seconds in all.
        """
        with self._wake:
            jobs = [job for request_id in request_ids for job in self._open.get(request_id, ())]
            for job in jobs:
                job.is_last = True
            if self._gaps:
                self._gaps = {slot: gap for slot, gap in self._gaps.items() if slot[0] not in request_ids}
            leaving = [job for each in self._open.values() for job in each if released and job.reads(released)]
        started = self._clock()
        until, grace_until = started + patience_s, started + min(patience_s, _GRACE_S)
        if jobs or leaving:
            with self._pages.hurried():
                self._cut_off(leaving, until, until)  # copied now or lost, at each step: worth waiting for an answer
                self._cut_off(jobs, until, grace_until)

    def _cut_off(self, jobs: Sequence[_Job], until: float, grace_until: float) -> None:
        for job in jobs:
            # A daemon that stands still answers no put: no step shall wait for it longer than an answer usually takes.
            done = job.copied.wait(max(grace_until - self._clock(), 0.0))
            if not done and job.is_copying:
                done = job.copied.wait(max(until - self._clock(), 0.0))
            if not done:
                job.cut()

    def drain(self, patience_s: float) -> bool:
        """Wait until every order is done. Return False if `patience_s` seconds did not suffice."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._open, patience_s)

    def close(self, patience_s: float) -> None:
        """Store the waiting blocks for at most `patience_s` seconds, drop the others, and end the thread."""
        self.drain(patience_s)
        with self._wake:
            self._closing = True
            left = [job for jobs in self._open.values() for job in jobs]
            self._wake.notify_all()
        for job in left:
            job.cut()
        if self._thread is not None:
            self._thread.join(patience_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._closing or bool(self._waiting or self._leaving))
                if self._closing:
                    return
                job = (self._leaving or self._waiting).popleft()
            self._done(job, self._store(job))
            job.copied.set()

    def _store(self, job: _Job) -> int:
        """Store the job's blocks; return how many leading ones are in the store now."""
        order, pages = job.order, self._pages.of(job.order.group)
        named = address(self._session, order.prefix, group=order.group)
        if named is None:
            return 0  # no daemon
        payloads = [partial(job.copy, pages, block_id) for block_id in order.block_ids[order.first_block :]]
        try:
            job.after.wait()
            with traced(order.prefix.trace):
                receipt = self._session.put(
                    **named,
                    payloads=payloads,
                    first_block=order.first_block,
                    payload_bytes=pages.block_bytes,
                    deadline_s=self._deadline_s,
                )
        except _CutOff:
            return 0
        except KVStoreError as error:
            self._say(f"blocks are not stored: {error}")
            return 0
        except Exception as error:  # the thread's end: a fault in storing must not end the engine
            self._say(f"blocks are not stored: {type(error).__name__}: {error}")
            return 0
        statuses = receipt.statuses
        return next((i for i, status in enumerate(statuses) if status not in (STORED, PRESENT)), len(statuses))

    def _done(self, job: _Job, stored: int) -> None:
        order = job.order
        with self._wake:
            self.stored_blocks += stored
            self.dropped_blocks += job.blocks - stored
            if stored < job.blocks and not job.is_last and order.stays:
                gap = order.first_block + stored
                self._gaps[job.slot] = min(gap, self._gaps.get(job.slot, gap))
            jobs = self._open[order.request_id]
            jobs.remove(job)
            if not jobs:
                del self._open[order.request_id]
            self._wake.notify_all()
