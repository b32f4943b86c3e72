"""Store full blocks of sequences that models are computing, in a thread of its own.

The module owns one worker for each session and the queue to it. It can neither fail nor delay a forward pass: a block
that cannot be stored is counted, with a reason.

The worker waits before it starts, since the first token is sampled just after the prompt's last block filled, and a
copy would delay it. The thread is no daemon thread and ends when its queue is empty: a program that ends after
`generate` still stores its blocks, within the deadlines of its puts.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from kvstore_client.receipt import PRESENT, STORED
from kvstore_client.session import Session
from kvstore_client.trace import TRACE
from kvstore_connectors.moments import Moment
from kvstore_connectors.transformers.copies import BlockSource
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint

Tokens = npt.NDArray[np.int32]

BATCH_BYTES = 16 * 1024 * 1024  # one put: large enough to spread its round trips
FIRST_TOKEN_S = 0.02
MOST_WAITING = 8  # sequences that may wait; each holds its K/V in memory until it is stored


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The first `blocks` blocks of a sequence of `tokens`, to be stored. They are computed once the moment `ready` has
    come. `source` has the payloads of the blocks that are not stored yet.
    """

    tokens: Tokens
    source: BlockSource
    blocks: int
    ready: Moment


@dataclass(slots=True, eq=False)  # two sequences differ even with equal tokens
class SequenceToStore:
    """The record of storing one sequence. `computed` has its blocks while any of them waits to be stored.
    `wanted_blocks` blocks are to be stored; `done_blocks` of them are stored, or will not be. `statuses` counts the
    results by status. `reason` says why storing stopped, or is "". `trace` is the span in which the model computed.
    """

    session: Session
    computed: ComputedBlocks | None = None
    wanted_blocks: int = 0
    done_blocks: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    reason: str = ""
    trace: bytes = b""

    @property
    def waiting_blocks(self) -> int:
        return 0 if self.reason else max(self.wanted_blocks - self.done_blocks, 0)

    def let_go(self) -> None:
        """Drop the references to the sequence's blocks, because all are stored or will not be."""
        computed, self.computed = self.computed, None
        if computed is not None:
            computed.source.stored(range(computed.blocks))


class SessionStorer:
    """A worker that stores the computed blocks of one session's sequences, in a thread. It waits `first_token_s`
    seconds before it begins, so that the model can answer first. The thread ends when no block waits.
    """

    def __init__(self, *, first_token_s: float = FIRST_TOKEN_S) -> None:
        self._first_token_s = first_token_s
        self._changed = threading.Condition()
        self._queue: deque[SequenceToStore] = deque()
        self._thread: threading.Thread | None = None

    def advance(self, sequence: SequenceToStore, computed: ComputedBlocks) -> None:
        """Announce that the blocks `computed` of `sequence` can be stored. It never waits."""
        with self._changed:
            sequence.computed, sequence.wanted_blocks, sequence.trace = computed, computed.blocks, TRACE.get()
            if sequence.waiting_blocks <= 0 or sequence in self._queue:
                return
            if len(self._queue) >= MOST_WAITING:
                sequence.reason = f"storing is {MOST_WAITING} sequences behind"
                sequence.let_go()
                return
            self._queue.append(sequence)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-hook-store")
                try:
                    self._thread.start()
                except RuntimeError as error:  # the interpreter is ending
                    self._thread = None
                    self._queue.clear()
                    sequence.reason = str(error)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until no block waits to be stored. Return False if `timeout_s` seconds did not suffice; None waits
        without a limit.
        """
        with self._changed:
            return self._changed.wait_for(lambda: self._thread is None, timeout_s)

    def _run(self) -> None:
        time.sleep(self._first_token_s)
        while True:
            with self._changed:
                while self._queue and self._queue[0].waiting_blocks <= 0:
                    self._queue.popleft().let_go()
                if not self._queue:
                    self._thread = None
                    self._changed.notify_all()
                    return
                sequence = self._queue[0]
                computed, first = sequence.computed, sequence.done_blocks
            try:
                self._put(sequence, computed, first)
            except KVStoreError as error:
                sequence.reason = f"storing was refused: {error}"
            except Exception as error:  # the thread's end: a bug in storing must not end the program it runs in
                sequence.reason = f"storing failed: {type(error).__name__}: {error}"

    def _put(self, sequence: SequenceToStore, computed: ComputedBlocks | None, first: int) -> None:
        session = sequence.session
        assert computed is not None, "a sequence that waits has its blocks"
        count = min(computed.blocks - first, max(1, BATCH_BYTES // all_groups_bytes(session.fingerprint)))
        blocks = range(first, first + count)
        runs = computed.source.runs(blocks)
        tokens = computed.tokens[: blocks.stop * session.block_tokens]
        computed.ready.wait()  # the put's deadline is for the daemon, not for what the model still computes
        TRACE.set(sequence.trace)
        for run in runs:
            receipt = session.put(tokens, first_block=run.first, payloads=run.payloads, group=run.group)
            if run.group == runs[0].group:  # the other groups have parts of the same blocks
                sequence.statuses.update(receipt.statuses)
            lost = next((at for at, status in enumerate(receipt.statuses) if status not in (STORED, PRESENT)), None)
            if lost is not None:
                # A prefix is found up to its first gap only: blocks after one would be stored in vain.
                status, why = receipt.statuses[lost], receipt.reason
                sequence.reason = (
                    f"block {run.first + lost} was {status}{f' ({why})' if why else ''}; later ones are not stored"
                )
                break
        computed.source.stored(blocks)
        sequence.done_blocks = first + count


def all_groups_bytes(fingerprint: Fingerprint) -> int:
    """Return the payload bytes of one block, summed over all layer groups of `fingerprint`."""
    return sum(fingerprint.payload_bytes(group.group_id) for group in fingerprint.groups)


_storers: WeakKeyDictionary[Session, SessionStorer] = WeakKeyDictionary()
_lock = threading.Lock()


def storer_of(session: Session) -> SessionStorer:
    """Return the worker that stores the blocks of `session`; there is one for each session."""
    with _lock:
        found = _storers.get(session)
        if found is None:
            found = _storers[session] = SessionStorer()
        return found


@dataclass(frozen=True, slots=True)
class CacheReport:
    """A snapshot of what a cache has restored, computed and stored for its sequence. `reason` says why no more tokens
    were restored, `store_reason` why no more are stored; each is "" if everything was. `lookup_s` and `restore_s` are
    the seconds spent on lookups and on copies. `waiting_blocks` is the number of full blocks that are not yet stored.
    """

    restored_tokens: int = 0
    computed_tokens: int = 0
    restored_bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    reason: str = ""
    stored_blocks: int = 0
    present_blocks: int = 0
    waiting_blocks: int = 0
    store_reason: str = ""
