"""Jobs under way beside vLLM's scheduler: their parts, the threads that move them, the move of a part, and the outcome
of each job.

The module owns the threads, the records of open jobs, and the order lease, copy, check. A part is chunks from the store
into rows of vLLM's CPU tier, or the reverse, by one memcpy each way. Jobs are moved in parts, so that several threads
load one job and no lease is held for long. Stores go through one thread, in order; messages to the daemon about a
request's end go behind its stores. Waiting stores keep rows of vLLM's CPU tier from being reused, so beyond a limit
further ones are dropped.

Invariants: every accepted job ends exactly once; when `drain` or `close` returns, no row is touched any more; nothing
is raised into the scheduler; no byte is read outside a lease; a chunk counts as loaded only if the lease still held
*after* it was copied; a miss, a full store and an absent daemon are outcomes, not errors.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from kvstore_client.memory import Bytes
from kvstore_client.receipt import PRESENT, STORED
from kvstore_client.results import REASON_NO_DAEMON, UNKNOWN_TIER
from kvstore_client.session import Session
from kvstore_connectors.engine_session import SayOnce
from kvstore_connectors.vllm_tier.chunks import ChunkRun, names
from kvstore_proto.identity import BlockKeys

DROPPED = "dropped"
FAILED = "failed"
_MOST_NOTICES = 256  # that wait; further ones are dropped
Move = Callable[[ChunkRun], list[str]]
LOADED = "loaded"
KEPT = frozenset({STORED, PRESENT})


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A load or store job of vLLM that has ended. `outcomes` has a word for each chunk, such as "loaded" or "stored",
    and `seconds` is the time from the job's start to its end.
    """

    job_id: int
    is_load: bool
    outcomes: dict[bytes, str]
    seconds: float

    def counts(self) -> Counter[str]:
        return Counter(self.outcomes.values())


@dataclass(slots=True)
class _Job:
    job_id: int
    is_load: bool
    parts_left: int
    started: float
    outcomes: dict[bytes, str] = field(default_factory=dict)


class Jobs:
    """The load and store jobs that vLLM has submitted, and the threads that carry them out. `load` and `store` are
    functions that move one part of a job, at most `part_chunks` chunks, and return the outcome of each chunk. At most
    `most_waiting_chunks` chunks wait to be stored. `say` is called once for each kind of trouble.
    """

    def __init__(
        self,
        load: Move,
        store: Move,
        *,
        part_chunks: int,
        load_threads: int,
        most_waiting_chunks: int,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load, self._store = load, store
        self._part_chunks, self._most_waiting = part_chunks, most_waiting_chunks
        self._say = SayOnce(say)
        self._clock = clock
        self._loaders = ThreadPoolExecutor(load_threads, "kvstore-tier-load")
        self._storer = ThreadPoolExecutor(1, "kvstore-tier-store")
        self._changed = threading.Condition()
        self._open: dict[int, _Job] = {}
        self._ended: list[EndedJob] = []
        self._waiting_chunks = 0  # to be stored
        self._notices = 0
        self._gives_up = False  # stores that have not begun

    def load(self, job_id: int, runs: Sequence[ChunkRun]) -> None:
        """Start to load the chunks of `runs` as the job `job_id`, and return at once."""
        parts = [part for run in runs for part in run.parts(self._part_chunks)]
        if not parts:
            self.refuse(job_id, (), is_load=True, outcome=FAILED)
            return
        job = _Job(job_id, True, len(parts), self._clock())
        with self._changed:
            self._open[job_id] = job
        for part in parts:
            self._loaders.submit(self._load_part, job, part)

    def store(self, job_id: int, keys: Sequence[bytes], cut: Callable[[], Sequence[ChunkRun]]) -> None:
        """Start to store the chunks `keys` as the job `job_id`, and return at once. `cut()` returns their runs, in the
        thread that stores. The job is dropped if too many chunks wait already.
        """
        with self._changed:
            is_full = self._waiting_chunks and self._waiting_chunks + len(keys) > self._most_waiting
            if not is_full:
                self._waiting_chunks += len(keys)
                self._open[job_id] = job = _Job(job_id, False, 1, self._clock())
        if is_full:
            self.refuse(job_id, keys, is_load=False, outcome=DROPPED)
        else:
            self._storer.submit(self._store_job, job, keys, cut)

    def refuse(self, job_id: int, keys: Sequence[bytes], *, is_load: bool, outcome: str) -> None:
        """End the job `job_id` at once, with `outcome` for each of its chunks `keys`. Nothing is moved."""
        with self._changed:
            self._ended.append(EndedJob(job_id, is_load, dict.fromkeys(keys, outcome), 0.0))

    def notify(self, work: Callable[[], object]) -> None:
        """Call `work`, a short call to the daemon, once the stores that wait now are done. It is dropped if many such
        calls wait, and its errors are only logged.
        """
        with self._changed:
            if self._gives_up or self._notices >= _MOST_NOTICES:
                return
            self._notices += 1
        self._storer.submit(self._notice, work)

    def take_ended(self) -> list[EndedJob]:
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        """Wait until no job is open. Stores that have not begun are dropped."""
        with self._changed:
            self._gives_up = True
            self._changed.wait_for(lambda: not self._open)
            self._gives_up = False

    def close(self) -> None:
        """Wait until no job is open, as `drain` does, and end the threads. No job may be given afterwards."""
        self.drain()
        with self._changed:
            self._gives_up = True
        self._loaders.shutdown()
        self._storer.shutdown()

    def _load_part(self, job: _Job, part: ChunkRun) -> None:
        outcomes = [FAILED] * len(part)
        try:
            outcomes = self._load(part)
        except Exception as error:  # the daemon refuses, a bug here: vLLM computes the chunks
            self._say(f"chunks are not loaded: {error}")
        finally:
            self._ends(job, dict(zip(part.keys, outcomes, strict=True)))

    def _store_job(self, job: _Job, keys: Sequence[bytes], cut: Callable[[], Sequence[ChunkRun]]) -> None:
        outcomes = dict.fromkeys(keys, DROPPED)
        try:
            for part in (part for run in cut() for part in run.parts(self._part_chunks)):
                if self._gives_up:
                    break
                outcomes.update(dict.fromkeys(part.keys, FAILED))
                outcomes.update(zip(part.keys, self._store(part), strict=True))
        except Exception as error:  # as above: a later miss
            self._say(f"chunks are not stored: {error}")
        finally:
            with self._changed:
                self._waiting_chunks -= len(keys)
            self._ends(job, outcomes)

    def _ends(self, job: _Job, outcomes: dict[bytes, str]) -> None:
        """End one part of a load, or a whole store."""
        with self._changed:
            job.outcomes.update(outcomes)
            job.parts_left -= 1
            if not job.parts_left:
                del self._open[job.job_id]
                self._ended.append(EndedJob(job.job_id, job.is_load, job.outcomes, self._clock() - job.started))
                self._changed.notify_all()

    def _notice(self, work: Callable[[], object]) -> None:
        try:
            if not self._gives_up:
                work()
        except Exception as error:  # a closed session, or a bug here
            self._say(f"the daemon was not informed: {error}")
        finally:
            with self._changed:
                self._notices -= 1


def present(session: Session, keys: BlockKeys, group: int, deadline_s: float) -> list[bool]:
    """Return for each of `keys` whether its chunk is stored in the layer group `group`. The index in shared memory
    answers, or the daemon, within `deadline_s` seconds, if the index is not certain.
    """
    found = session.probe(keys=keys, group=group)
    if UNKNOWN_TIER in found.tiers:
        found = session.lookup(keys=keys, group=group, deadline_s=deadline_s)
    tiers = found.tiers
    return [place < len(tiers) and tiers[place] not in ("absent", UNKNOWN_TIER) for place in range(len(keys))]


def load(session: Session, run: ChunkRun, memory: Bytes, deadline_s: float) -> list[str]:
    """Copy the chunks of `run` from the store into their rows of `memory`, uint8[rows, row_bytes]. Return the outcome
    of each chunk: "loaded", or the reason why it was not loaded; the bytes of its row are then undefined. The first
    missing chunk ends the load, because vLLM computes everything behind it.
    """
    outcomes = ["missing"] * len(run)
    keys = names(session, run.keys, run.group, run.adapter)
    if keys is None:
        return [REASON_NO_DAEMON] * len(run)
    with session.get(keys=keys, group=run.group, deadline_s=deadline_s) as lease:
        count = len(lease)
        for block, row in enumerate(run.rows[:count]):
            payload = lease.payload(block)
            if len(payload) != memory.shape[1]:
                count = block
                break
            np.copyto(memory[row], payload)
        is_valid = lease.valid  # asked after the copy
        outcomes[:count] = [LOADED if is_valid else "lease_ended"] * count
        outcomes[count:] = [lease.reason or "missing"] * (len(run) - count)
    return outcomes


def store(session: Session, run: ChunkRun, memory: Bytes, deadline_s: float) -> list[str]:
    """Copy the chunks of `run` from their rows of `memory`, uint8[rows, row_bytes], into the store. Return the status
    of each chunk: "stored", "present", "declined", "no_room", "failed", …

    A chunk whose predecessor is not stored begins a chain.
    """
    chain = run.keys if run.before is None else (run.before, *run.keys)
    keys = names(session, chain, run.group, run.adapter)
    if keys is None:
        return [REASON_NO_DAEMON] * len(run)
    if run.before is not None and present(session, keys[:1], run.group, deadline_s) != [True]:
        keys = keys[1:]
    receipt = session.put(
        keys=keys,
        first_block=len(keys) - len(run),
        payloads=[memory[row] for row in run.rows],
        group=run.group,
        payload_bytes=memory.shape[1],
        deadline_s=deadline_s,
    )
    return list(receipt.statuses)
