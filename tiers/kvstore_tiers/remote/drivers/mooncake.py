"""Values in Mooncake Store: memory that many nodes lend to one master, over TCP or RDMA.

    mooncake://MASTER:PORT

`?` adds `protocol=tcp|rdma`, `device=NAME,NAME` (the RDMA devices), `metadata=URL` (of a metadata server; by default
nodes ask each other), `segment=SIZE` (memory that this node lends to the store; none by default) and `local=HOST`
(where other nodes reach this one; by default the address from which it reaches the master). There are no credentials.

Facts of the library that this file is built around (0.3.13):
- `put` answers success for a name that is taken. A put session reports it, so a write is a session: start, transfer,
  end. A name is taken as soon as a session has begun, and until 30 s after its writer died. It can be read, and exists
  by the library's own question, once the session has ended.
- Its own time limits are 30 s for a transfer and 90 s for a set-up without a master, and a transfer that was given up
  may still write to its memory: see `MemoryHeld`.
- The master evicts by itself, except values that were read in the last seconds.
- A call that moves values asks without pause whether they have arrived, and so takes a processor from the threads that
  move them, here and in the daemon: its thread steps behind those, and values are read by one call at a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

import numpy as np

from kvstore_console.units import parse_size
from kvstore_tiers.remote.driver import Driver, MemoryHeld, Placed, WriteResult
from kvstore_tiers.remote.drivers import advice
from kvstore_tiers.remote.drivers.bounded_calls import BoundedCall, BoundedCalls, GivenUp

DEFAULT_PORT = 50051
QUERY: Final = frozenset({"protocol", "device", "metadata", "segment", "local"})


@dataclass(frozen=True)
class StoreAddress:
    """The address of a Mooncake store's master, and how this node takes part in the store: `segment_bytes` of memory
    that it lends, the network protocol and `devices`, and the address `local` at which others reach it.
    """

    host: str
    port: int
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 0
    local: str = ""

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"


def place_of(url: str) -> StoreAddress:
    """Return the address of the Mooncake store that `url` describes. Raises ValueError for a wrong URL."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := set(query) - QUERY:
        raise ValueError(f"mooncake:// takes no {min(unknown)!r}: the names are {', '.join(sorted(QUERY))}")
    if not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not mooncake://MASTER:PORT")
    protocol = query.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ValueError(f"protocol={protocol}: it is tcp or rdma")
    if protocol == "rdma" and not query.get("device"):
        raise ValueError("protocol=rdma needs device=NAME, such as device=mlx5_0")
    return StoreAddress(
        host=parts.hostname,
        port=parts.port or DEFAULT_PORT,
        protocol=protocol,
        devices=query.get("device", ""),
        metadata=query.get("metadata") or "P2PHANDSHAKE",
        segment_bytes=parse_size(query.get("segment", "0")),
        local=query.get("local", ""),
    )


NO_ROOM = -200
NOT_FOUND, NOT_READY, TAKEN, LEASE_EXPIRED, GONE = -704, -703, -705, -707, -712
ABSENT: Final = frozenset({NOT_FOUND, NOT_READY, LEASE_EXPIRED, GONE})
BUSY: Final = frozenset({-706, -708, -714})  # a lease, a copy or a read in progress holds the value
TOO_SHORT = -600  # and other wrong arguments
TRANSFER_FAILED = -800
RPC_TIMEOUT = -901


def need(where: str, answers: Sequence[int], allowed: frozenset[int] | set[int] = frozenset()) -> None:
    """Raise an error if one of `answers`, return codes of Mooncake's library, is an error that `allowed` does not
    contain. `where` names the store in the message. Raises TimeoutError, ConnectionError, or another OSError.
    """
    for answer in answers:
        if answer >= 0 or answer in allowed:
            continue
        if answer == RPC_TIMEOUT:
            raise TimeoutError("no answer in time")
        if answer <= -900:
            raise ConnectionError(f"{where} is not reached: the library's code {answer}")
        raise OSError(f"{where} or a node of its store failed: the library's code {answer}")


try:
    from mooncake.store import MooncakeDistributedStore
except ModuleNotFoundError:
    raise
except ImportError as error:  # a library of the system that its wheel does not bring
    _UNUSABLE: ImportError | None = error
else:
    _UNUSABLE = None

LARGEST_VALUE_BYTES = 64 << 20
LOCAL_BUFFER_BYTES = 16 << 20  # of the library, for calls that are not used here
LONGEST_TIMEOUT_S = 25.0  # shorter than the library's own, which lets go of memory that it may still write to
RPC_SHARE = 0.8  # of the time limit: the library gives up first, and says why
GIVEN_UP_PER_THREAD = 4
NICE = 5  # of a thread that waits for a transfer, as the daemon's threads that copy: on a full machine a much higher
# one would notice the end late
_KINDS: Final = {0: WriteResult.STORED, NO_ROOM: WriteResult.NO_ROOM}
RETRY_S = 0.02
TAKEN_PATIENCE_S = 0.5  # with a name that another writer began: what it moves takes some milliseconds

_LEFT_OPEN: Final[list[Any]] = []
"""Clients of closed drivers, with calls that were given up: the library crashes if they are closed or collected."""

_Result = TypeVar("_Result")


def open_driver(url: str, *, timeout_s: float, threads: int, credentials: Mapping[str, str]) -> Driver:
    """Return a driver of the Mooncake store at `url`, which connects at its first call. A call may take `timeout_s`
    seconds, and `threads` threads may call. Raises ValueError for a wrong URL and for `credentials`, which Mooncake
    does not have.
    """
    if credentials:
        raise ValueError("Mooncake knows no credentials: keep its master on a network of your own")
    place = place_of(url)
    if _UNUSABLE is not None:
        raise ModuleNotFoundError(f"Mooncake's library cannot be loaded: {advice(str(_UNUSABLE))}", name="mooncake")
    return MooncakeDriver(place, min(timeout_s, LONGEST_TIMEOUT_S), threads)


class MooncakeDriver(Driver):
    """A driver of the Mooncake store at `place`, with one connection for all threads. Call `lend` first: values are
    transferred to and from the memory that it gets.
    """

    largest_value_bytes = LARGEST_VALUE_BYTES
    evicts = True
    reads_at_once = 1

    def __init__(self, place: StoreAddress, timeout_s: float, threads: int) -> None:
        self._place = place
        self._timeout_s = timeout_s
        self._calls = BoundedCalls("mooncake", GIVEN_UP_PER_THREAD * threads)
        self._connecting = threading.Lock()
        self._store: Any = None
        self._memory: memoryview | None = None
        self._is_closed = False
        self._writing_lock = threading.Lock()
        self._writing: set[str] = set()

    def lend(self, memory: memoryview) -> None:
        self._memory = memory

    def sizes(self, names: Sequence[str]) -> list[int]:
        return self._run(lambda store, _: self._sizes(store, names)) if names else []

    def read(self, wanted: Sequence[Placed]) -> list[int]:
        has_begun = threading.Event()

        def read(store: Any, call: BoundedCall) -> list[int]:
            there = self._exist(store, [placed.name for placed in wanted])
            found = [placed for placed, is_there in zip(wanted, there, strict=True) if is_there]
            has_begun.set()
            if call.is_given_up or not found:
                return [0] * len(wanted)
            sizes = iter(self._read(store, found))
            return [next(sizes) if is_there else 0 for is_there in there]

        if not wanted:
            return []
        try:
            return self._run(read)
        except GivenUp as error:
            if has_begun.is_set():
                raise MemoryHeld(f"{error}, and may still write to the memory") from error
            raise

    def write(self, values: Sequence[Placed]) -> list[WriteResult]:
        return self._run(lambda store, call: self._write(store, values, call)) if values else []

    def remove(self, names: Sequence[str]) -> None:
        if names:
            self._run(lambda store, call: self._remove(store, list(names), call))

    def probe(self) -> None:
        self._run(lambda store, _: self._exist(store, ["probe"]))

    def close(self) -> None:
        self._is_closed = True
        with self._connecting:
            store, self._store = self._store, None
        if store is None:
            return
        if self._calls.wait_idle(self._timeout_s):
            store.close()
        else:
            _LEFT_OPEN.append(store)

    # One call of the library or two, in a thread that may be given up

    def _sizes(self, store: Any, names: Sequence[str]) -> list[int]:
        there = [name for name, is_there in zip(names, self._exist(store, names), strict=True) if is_there]
        copies = store.batch_get_replica_desc(there) if there else {}
        return [self._nbytes(store, name, copies[name]) if copies.get(name) else 0 for name in names]

    def _nbytes(self, store: Any, name: str, copies: Sequence[Any]) -> int:
        """Return the bytes of a value, by the description of its copies; a copy on another node's disk has none."""
        for copy in copies:
            if copy.is_memory_replica():
                return int(copy.get_memory_descriptor().buffer_descriptor.size)
        size: int = store.get_size(name)
        need(self._where, [size], allowed=ABSENT)
        return max(size, 0)

    def _exist(self, store: Any, names: Sequence[str]) -> list[bool]:
        answers = store.batch_is_exist(list(names))
        need(self._where, answers, allowed=ABSENT)
        return [answer > 0 for answer in answers]

    def _read(self, store: Any, found: Sequence[Placed]) -> list[int]:
        _step_behind()
        distinct = {placed.name: placed for placed in found}  # the library fails for a name that is twice in a call
        names, places, rooms = _arguments(list(distinct.values()))
        answers = dict(zip(names, store.batch_get_into(names, places, rooms), strict=True))
        if short := [name for name, answer in answers.items() if answer == TOO_SHORT]:
            answers |= zip(short, self._sizes(store, short), strict=True)
        if any(answer != TRANSFER_FAILED for answer in answers.values()):  # one node of several is gone
            answers = {name: NOT_FOUND if answer == TRANSFER_FAILED else answer for name, answer in answers.items()}
        need(self._where, list(answers.values()), allowed=ABSENT)
        sizes = [max(answers[placed.name], 0) for placed in found]
        again = [number for number, placed in enumerate(found) if placed is not distinct[placed.name]]
        if again:
            for number, size in zip(again, self._read(store, [found[number] for number in again]), strict=True):
                sizes[number] = size
        return sizes

    def _write(self, store: Any, values: Sequence[Placed], call: BoundedCall) -> list[WriteResult]:
        """Write values. The library has one session for each name: a name that another thread is writing counts as
        taken.
        """
        with self._writing_lock:
            mine = {value.name: value for value in reversed(values) if value.name not in self._writing}
            self._writing |= mine.keys()
        try:
            written = self._store_each(store, list(mine.values()), call) if mine else {}
        finally:
            with self._writing_lock:
                self._writing -= mine.keys()
        written |= self._of_others(store, {value.name for value in values} - written.keys(), call)
        is_again = [mine.get(value.name) is not value and written[value.name] is WriteResult.STORED for value in values]
        return [
            WriteResult.EXISTS if again else written[value.name] for value, again in zip(values, is_again, strict=True)
        ]

    def _of_others(self, store: Any, names: set[str], call: BoundedCall) -> dict[str, WriteResult]:
        """Return the result for names that others began to write: they exist once they can be read."""
        began, there = time.monotonic(), set[str]()
        while names - there:
            waiting = sorted(names - there)
            there |= {name for name, exists in zip(waiting, self._exist(store, waiting), strict=True) if exists}
            left_s = min(began + TAKEN_PATIENCE_S - time.monotonic(), call.remaining_s - RETRY_S)
            if left_s <= 0 or call.is_given_up:
                break
            if names - there:
                time.sleep(min(RETRY_S, left_s))
        return {name: WriteResult.EXISTS if name in there else WriteResult.BEGUN for name in names}

    def _store_each(self, store: Any, values: Sequence[Placed], call: BoundedCall) -> dict[str, WriteResult]:
        """Return the result of each name that was not taken."""
        names, places, sizes = _arguments(values)
        answers = dict(zip(names, store.batch_put_session_start(names, sizes), strict=True))
        started = [number for number, name in enumerate(names) if answers[name] == 0]
        open_names = [names[number] for number in started]
        try:
            need(self._where, list(answers.values()), allowed={TAKEN, NO_ROOM})
            if not started:
                return {name: _KINDS[answer] for name, answer in answers.items() if answer != TAKEN}
            _step_behind()
            moved = store.batch_put_from_multi_buffer_ranges(
                open_names,
                [[places[number]] for number in started],
                [[sizes[number]] for number in started],
                [[0]] * len(started),
            )
            if call.is_given_up:  # its memory may have had other bytes meanwhile
                raise TimeoutError("given up")
            need(self._where, moved)
            need(self._where, store.batch_put_session_end(open_names))
            open_names = []
        finally:
            if open_names:
                store.batch_put_session_revoke(open_names)
        return {name: _KINDS[answer] for name, answer in answers.items() if answer != TAKEN}

    def _remove(self, store: Any, names: list[str], call: BoundedCall) -> None:
        while True:
            answers = store.batch_remove(names, True)
            need(self._where, answers, allowed=ABSENT | BUSY)
            names = [name for name, answer in zip(names, answers, strict=True) if answer in BUSY]
            if not names or call.is_given_up:
                return
            time.sleep(min(RETRY_S, call.remaining_s))

    # The library's client

    def _run(self, function: Callable[[Any, BoundedCall], _Result]) -> _Result:
        """Return the result of `function`. Raises OSError that names this store."""
        try:
            return self._calls.run(lambda call: function(self._connected(call), call), self._timeout_s)
        except TimeoutError as error:
            raise type(error)(f"{self._where}: {error}") from error

    @property
    def _where(self) -> str:
        return f"Mooncake's master at {self._place.master}"

    def _connected(self, call: BoundedCall) -> Any:
        with self._connecting:
            if self._is_closed:
                raise ConnectionError(f"{self._where}: the driver is closed")
            if self._store is None and not call.is_given_up:
                self._store = self._connect(call)
            if self._store is None:
                raise TimeoutError("given up")
            return self._store

    def _connect(self, call: BoundedCall) -> Any:
        if self._memory is None:
            raise RuntimeError("no memory was lent to the driver")
        place = self._place
        try:  # its set-up tries for 90 s where nothing listens
            with socket.create_connection((place.host, place.port), timeout=call.remaining_s or 0.001) as reached:
                local = place.local or reached.getsockname()[0]
        except TimeoutError:
            raise
        except OSError as error:
            raise ConnectionError(f"{self._where} is not reached: {error}") from error
        limit_ms = str(max(1, int(self._timeout_s * RPC_SHARE * 1000)))
        os.environ |= {"MC_RPC_TIMEOUT_MS": limit_ms, "MC_RPC_CONNECT_TIMEOUT_MS": limit_ms}
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        store = MooncakeDistributedStore()
        code = store.setup(
            local, place.metadata, place.segment_bytes, LOCAL_BUFFER_BYTES, place.protocol, place.devices, place.master
        )
        if code:
            raise ConnectionError(f"{self._where} does not take this node: the library's code {code}")
        if code := store.register_buffer(_address(self._memory), len(self._memory)):
            store.close()
            raise OSError(f"Mooncake did not register the lent memory: the library's code {code}")
        return store


def _step_behind() -> None:
    """Lower the calling thread's priority for the rest of its life: each call of the library has a thread of its
    own.
    """
    with contextlib.suppress(OSError):  # the whole process is behind already
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


def _arguments(placed: Sequence[Placed]) -> tuple[list[str], list[int], list[int]]:
    """Return names, addresses and lengths, as the library takes them."""
    return [one.name for one in placed], [_address(one.memory) for one in placed], [len(one.memory) for one in placed]


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0]) if len(memory) else 0
