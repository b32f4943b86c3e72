"""A client of two daemons in a process of its own: the load under which a remote store's faults are measured.

It works with both by turns of `SLICE_S`: the store of one has the fault, that of the other is well. So both see the
same machine at the same time. It gets what is in DRAM, what may be remote, and what is nowhere, puts, and compares
every byte; all clients use the same tokens, and each has bytes of its own, so another tenant's would be noticed.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_client import KVStoreError, Session
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.running_daemon import RunningDaemon, connected_as

Array = npt.NDArray[np.uint8]
MODEL = model()
BLOCKS, NEW_BLOCKS = 32, 4
LOCAL, REMOTE = range(4), range(100, 112)  # conversations: asked for all the time; evicted from DRAM and NVMe
SLICE_S = 0.25
PAUSE_S = 0.002  # between turns
DEADLINE_S = 0.5
_OWN = 10_000_000  # from the numbers of one client's bytes to the next one's
_NEW, _NOWHERE = 10_000, 1_000_000
EVERY_REMOTE, EVERY_PUT, EVERY_NOWHERE = 4, 5, 6


@dataclass
class Seen:
    """What a client saw: seconds of whole gets from DRAM and of puts of `NEW_BLOCKS`; requests, and of these how many
    failed and had wrong bytes; gets of conversations in use, and how many found all blocks; bytes from slower tiers."""

    gets: list[float] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    wrong: int = 0
    wanted: int = 0
    whole: int = 0
    loaded_bytes: int = 0

    def __add__(self, other: Seen) -> Seen:
        return Seen(**{name: mine + getattr(other, name) for name, mine in vars(self).items()})


class Client:
    """Client number `own` of one daemon."""

    def __init__(self, session: Session, own: int) -> None:
        self._session = session
        self._own = own
        self._turn = 0
        self._payloads = lru_cache(len(LOCAL) + len(REMOTE))(self._made)

    def fill(self, settled: Callable[[], bool]) -> None:
        """Store the conversations; one that was evicted before the store had it, again."""
        for number in (*REMOTE, *LOCAL):
            while True:
                receipt = self._session.put(tokens_of(number, BLOCKS), payloads=self._payloads(number), wait="settled")
                if receipt.visible_blocks < BLOCKS:
                    raise RuntimeError(f"the daemon did not store a conversation: {receipt}")
                if settled():
                    break

    def turn(self, seen: Seen) -> None:
        self._turn = turn = self._turn + 1
        number = LOCAL[turn % len(LOCAL)]
        if not self._get(number, seen, is_in_use=True):
            self._put(number, self._payloads(number), seen)  # as an engine does that has computed them
        if turn % EVERY_REMOTE == 0:
            self._get(REMOTE[turn // EVERY_REMOTE % len(REMOTE)], seen)
        if turn % EVERY_NOWHERE == 0:
            self._get(_NOWHERE + turn, seen)
        if turn % EVERY_PUT == 0:
            self._put(_NEW + turn, self._made(_NEW + turn, NEW_BLOCKS), seen)

    def _made(self, number: int, blocks: int = BLOCKS) -> list[Array]:
        return payloads_of(number + self._own * _OWN, blocks, MODEL)

    def _get(self, number: int, seen: Seen, *, is_in_use: bool = False) -> bool:
        """Whether all blocks were there."""
        seen.requests += 1
        began = time.perf_counter()
        try:
            with self._session.get(tokens_of(number, BLOCKS), deadline_s=DEADLINE_S) as lease:
                seconds = time.perf_counter() - began
                seen.loaded_bytes += lease.promoted_bytes
                if is_in_use:
                    seen.wanted += 1
                    seen.whole += lease.blocks == BLOCKS
                    if lease.blocks == BLOCKS and not lease.promoted_bytes:
                        seen.gets.append(seconds)
                if lease.blocks and not holds(lease, self._payloads(number)[: lease.blocks]):
                    seen.wrong += 1
                return bool(lease.blocks == BLOCKS)
        except KVStoreError:
            seen.failed += 1
            return False

    def _put(self, number: int, payloads: list[Array], seen: Seen) -> None:
        seen.requests += 1
        began = time.perf_counter()
        try:
            self._session.put(tokens_of(number, len(payloads)), payloads=payloads)
            if len(payloads) == NEW_BLOCKS:
                seen.puts.append(time.perf_counter() - began)
        except KVStoreError:
            seen.failed += 1


class ClientProcess:
    """The parent's end. What `run` gives is in the order of the daemons."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def fill(self, which: int, settled: Callable[[], bool]) -> None:
        """Store the conversations in one daemon; `settled`, called after each, says whether the store has it."""
        self._connection.send(("fill", which))
        while self._connection.recv():
            self._connection.send(settled())

    def begin(self, began_s: float, seconds: float) -> None:
        """Work from `began_s` of the monotonic clock on."""
        self._connection.send(("run", began_s, seconds))

    def end(self) -> list[Seen]:
        seen: list[Seen] = self._connection.recv()
        return seen


@contextmanager
def client_process(directories: list[Path], uid: int, own: int) -> Iterator[ClientProcess]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, directories, uid, own))
    process.start()
    theirs.close()
    try:
        yield ClientProcess(ours)
    finally:
        ours.close()
        process.join()


def _serve(connection: Connection, directories: list[Path], uid: int, own: int) -> None:
    with ExitStack() as stack:
        daemons = [RunningDaemon(directory) for directory in directories]
        clients = [Client(stack.enter_context(connected_as(daemon, uid, MODEL)), own) for daemon in daemons]

        def settled() -> bool:
            connection.send(True)
            return bool(connection.recv())

        while True:
            try:
                what, *given = connection.recv()
            except EOFError:
                return
            if what == "fill":
                clients[given[0]].fill(settled)
                connection.send(False)
            else:
                connection.send(_run(clients, *given))


def _run(clients: list[Client], began_s: float, seconds: float) -> list[Seen]:
    seen = [Seen() for _ in clients]
    time.sleep(max(0.0, began_s - time.monotonic()))
    while (passed_s := time.monotonic() - began_s) < seconds:
        which = int(passed_s / SLICE_S) % len(clients)
        clients[which].turn(seen[which])
        time.sleep(PAUSE_S)
    return seen
