"""The ledger: a later process's knowledge of the arenas and of their readers, in one small memfd.

    offset   size            what
    0        4096            head: magic, version, layouts, maker, counters
    4096     64 * ARENAS     an arena a row: number, size, owner, slot size, slots handed out, highest generation, and
                             the device that has the blocks
    ...      64 * SESSIONS   a client a row: session, process, token
    ...      256 * LEASES    up to 30 slots of a lease a row; a lease takes as many rows as it needs

The module owns these bytes and their order of writing. The control thread writes a row when an event happens, in under
a microsecond a field, and may be killed between any two stores: a row is filled first and
made live last, and everything that is changed in place is one aligned store of 8 bytes, in the machine's own order.
The two tokens of a session, 16 bytes each, are too long for one store: the former one, which its client may still
name, is written first, so that one whole token is there at any moment.
Invariants: an arena's row never claims more than its bytes hold; a lease is here whole or not at all. A lease that
found no row is not here: then its client cannot have it back after a crash, and gets a refusal.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES
from kvstore_proto.arena import VERSION as HEADER_VERSION
from kvstore_tiers.arena import ArenaRecord
from kvstore_tiers.base import Slot
from kvstored.store.blocks.runs import SlotRun

MAGIC = b"KVLEDGER"
VERSION = 2
MAX_ARENAS, MAX_SESSIONS, LEASE_ROWS = 16_384, 2048, 8192
SLOTS_A_ROW = 30
_PAGE = 4096
_HEAD = struct.Struct("8s4I16s16sQQQ")  # ..., epoch, boot, device and inode of the state directory, uid
_NEXT_ARENA, _LAST_LEASE, _LAST_SESSION = 128, 136, 144  # offsets of counters in the head
_NEXT_CHUNKS = 1024  # offset: a counter for each range of numbers of device memory
CHUNKS_A_TIER = 1 << 26  # numbers of device memory that one tier may use
_U64 = struct.Struct("Q")  # native: one store
_NAME16 = struct.Struct("16s")
_ARENA = struct.Struct("QQ16sQQQQ")  # number (0: no arena in this row), size, owner, what changes in place, device
_SLOT_BYTES, _HANDED_OUT, _HIGH_GENERATION = 32, 40, 48  # offsets in the row
_SESSION = struct.Struct("IIQQ16s16s")  # live, pid, start, session, token, former token
_START, _SESSION_ID, _TOKEN, _FORMER = 8, 16, 24, 40
_LEASE = struct.Struct("IIQ")  # slots in this row (0: no lease), session; lease and position of the row in it
_ROW_BITS = 16  # of the second word: which row of the lease it is, and of how many
_ARENA_BYTES, _SESSION_BYTES, _LEASE_BYTES = 64, 64, 256
assert _ARENA.size <= _ARENA_BYTES and _SESSION.size <= _SESSION_BYTES
assert _LEASE.size + 8 * SLOTS_A_ROW <= _LEASE_BYTES
_SESSIONS_AT = _PAGE + MAX_ARENAS * _ARENA_BYTES
_LEASES_AT = _SESSIONS_AT + MAX_SESSIONS * _SESSION_BYTES
LEDGER_BYTES = _LEASES_AT + LEASE_ROWS * _LEASE_BYTES
_LAYOUT = (VERSION, HEADER_VERSION << 16 | HEADER_BYTES, LEDGER_BYTES, MAX_ARENAS)
_NAME = "kvstore-ledger"
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_OFFSET_UNIT = 12  # bits: slots begin on pages
_PLACES_BYTES = SLOTS_A_ROW * _U64.size

Place = tuple[int, int]


class ForeignLedger(ValueError):
    """An error: the kept ledger (the former daemon's record of its memory and clients) cannot be used. The message says
    why."""


class FormerLease(NamedTuple):
    lease_id: int
    places: list[Place]


class FormerSession(NamedTuple):
    """A client's session with the former process of the daemon, read from the ledger. `tokens` are the session tokens
    by which the client may name it."""

    session_id: int
    pid: int
    start_ticks: int
    tokens: tuple[bytes, ...]
    leases: list[FormerLease]


class Ledger:
    """A shared memory (memfd) that lists arenas, clients and leases for the daemon's next process. `descriptor` is the
    file descriptor of a kept ledger, which is checked first (raises ForeignLedger); None makes a new ledger.
    """

    def __init__(self, state_dir: Path, descriptor: int | None = None) -> None:
        self.fd = _new_memory() if descriptor is None else descriptor
        if descriptor is not None:
            _require_ledger(descriptor)
        self._memory = mmap.mmap(self.fd, LEDGER_BYTES)
        self._rows_of_arena: dict[int, int] = {}
        self._rows_of_lease: dict[int, list[int]] = {}
        self._row_of_session: dict[int, int] = {}
        try:
            if descriptor is None:
                self._write_head(state_dir)
            else:
                self._judge_head(state_dir)
                self._read_rows()
        except ForeignLedger:
            self._memory.close()
            raise
        in_leases = [at for rows in self._rows_of_lease.values() for at in rows]
        self._free_arenas = _free_rows(_PAGE, _ARENA_BYTES, MAX_ARENAS, self._rows_of_arena.values())
        self._free_sessions = _free_rows(_SESSIONS_AT, _SESSION_BYTES, MAX_SESSIONS, self._row_of_session.values())
        self._free_leases = _free_rows(_LEASES_AT, _LEASE_BYTES, LEASE_ROWS, in_leases)

    @property
    def epoch(self) -> bytes:
        """The bytes that identify the numbering of arenas: while they stay the same, an arena's number means the same
        memory.
        """
        found: bytes = _HEAD.unpack_from(self._memory)[5]
        return found

    @property
    def next_arena(self) -> int:
        """An arena number that was never used."""
        return max(1, self._counter(_NEXT_ARENA))

    def next_chunk(self, first: int) -> int:
        """Return a number that no chunk of device memory ever had, in the range that begins at `first`."""
        return max(first, self._counter(_counter_of(first)))

    @property
    def last_lease_id(self) -> int:
        return self._counter(_LAST_LEASE)

    @property
    def last_session_id(self) -> int:
        return self._counter(_LAST_SESSION)

    def close(self) -> None:
        if self.fd >= 0:
            self._memory.close()
            os.close(self.fd)
            self.fd = -1

    # Arenas

    def arenas(self) -> list[ArenaRecord]:
        """Return the arenas of the former process, sorted by number."""
        found = [_ARENA.unpack_from(self._memory, at) for at in self._rows_of_arena.values()]
        return [ArenaRecord(number, nbytes, owner.hex(), *rest) for number, nbytes, owner, *rest in sorted(found)]

    def number_taken(self, number: int) -> None:
        """Note that an arena has this `number`, so that no later arena gets the same one."""
        self._raise_counter(_counter_of(number), number + 1)

    def add_arena(self, record: ArenaRecord) -> bool:
        """Enter the arena that `record` describes. Return False if the ledger has no row left, or no tenant owns the
        arena."""
        self.number_taken(record.number)
        if not self._free_arenas or len(record.owner) != 32:
            return False
        at = self._rows_of_arena[record.number] = self._free_arenas.pop()
        _ARENA.pack_into(
            self._memory, at, 0, record.nbytes, bytes.fromhex(record.owner), record.slot_bytes, record.handed_out,
            record.high_generation, record.device,
        )  # fmt: skip
        _U64.pack_into(self._memory, at, record.number)
        return True

    def change_arena(self, record: ArenaRecord) -> None:
        at = self._rows_of_arena.get(record.number)
        if at is None:
            return
        memory = self._memory
        _U64.pack_into(memory, at + _HIGH_GENERATION, record.high_generation)
        if _U64.unpack_from(memory, at + _SLOT_BYTES)[0] != record.slot_bytes:
            _U64.pack_into(memory, at + _HANDED_OUT, 0)  # first: there is no header at the new places
            _U64.pack_into(memory, at + _SLOT_BYTES, record.slot_bytes)
        _U64.pack_into(memory, at + _HANDED_OUT, record.handed_out)

    def forget_arena(self, number: int) -> None:
        at = self._rows_of_arena.pop(number, None)
        if at is not None:
            _U64.pack_into(self._memory, at, 0)
            self._free_arenas.append(at)

    # Clients

    def sessions(self) -> list[FormerSession]:
        """Return the sessions that had not ended when the former process ended, with their leases."""
        leases: dict[int, list[FormerLease]] = {}
        for lease_id, rows in list(self._rows_of_lease.items()):
            session_id, places = self._read_lease(rows)
            if session_id in self._row_of_session and places:
                leases.setdefault(session_id, []).append(FormerLease(lease_id, places))
            else:
                self.end_lease(lease_id)  # of a call that was over with its process, or not written whole
        found = []
        for session_id, at in self._row_of_session.items():
            _, pid, start, _, token, former = _SESSION.unpack_from(self._memory, at)
            found.append(FormerSession(session_id, pid, start, (token, former), leases.get(session_id, [])))
        return found

    def open_session(
        self, session_id: int, pid: int, start_ticks: int, token: bytes, former: bytes = bytes(16)
    ) -> None:
        """Enter the session `session_id` of the process `pid`, which started at `start_ticks`. If a client of the
        former process reconnects, its session keeps its number and gets the new `token`; `former` is the token that the
        client named, which stays valid until it has received the new one."""
        self._raise_counter(_LAST_SESSION, session_id)
        memory, at = self._memory, self._row_of_session.get(session_id)
        if at is None:
            if not self._free_sessions:
                return  # it will not be known again after a crash
            at = self._row_of_session[session_id] = self._free_sessions.pop()
            _U64.pack_into(memory, at, 0)
        _U64.pack_into(memory, at + _START, start_ticks)
        _U64.pack_into(memory, at + _SESSION_ID, session_id)
        _NAME16.pack_into(memory, at + _FORMER, former)
        _NAME16.pack_into(memory, at + _TOKEN, token)
        _U64.pack_into(memory, at, pid << 32 | 1)

    def close_session(self, session_id: int) -> None:
        at = self._row_of_session.pop(session_id, None)
        if at is not None:
            _U64.pack_into(self._memory, at, 0)
            self._free_sessions.append(at)

    def record_lease(self, lease_id: int, session_id: int, slots: Sequence[Slot]) -> None:
        memory, free = self._memory, self._free_leases
        _U64.pack_into(memory, _LAST_LEASE, lease_id)
        rows = -(-len(slots) // SLOTS_A_ROW)
        if rows > len(free):
            return
        columns = SlotRun.of(slots)
        containers, offsets = columns.containers, columns.offsets
        if len(slots) and containers.count(arena := containers[0]) == len(slots):  # as a rule
            above = arena << 32
            places = [above | offset >> _OFFSET_UNIT for offset in offsets]
        else:
            places = [arena << 32 | at >> _OFFSET_UNIT for arena, at in zip(containers, offsets, strict=True)]
        packed = array("Q", places).tobytes()
        second = _U64.pack(lease_id << _ROW_BITS | rows)
        taken = self._rows_of_lease[lease_id] = [free.pop() for _ in range(rows)]
        for position, at in enumerate(taken):
            part = packed[position * _PLACES_BYTES : (position + 1) * _PLACES_BYTES]
            struct.pack_into(f"{_U64.size + len(part)}s", memory, at + _U64.size, second + part)
            _U64.pack_into(memory, at, session_id << 32 | len(part) // _U64.size)

    def end_lease(self, lease_id: int) -> None:
        for at in self._rows_of_lease.pop(lease_id, ()):
            _U64.pack_into(self._memory, at, 0)
            self._free_leases.append(at)

    def _read_lease(self, rows: Sequence[int]) -> tuple[int, list[Place]]:
        """Return the session of a lease and its slots; no slots if rows are missing. (Rows end up in any order: the
        order of slots is lost.)
        """
        places: list[Place] = []
        session_id = wanted = 0
        for at in rows:
            count, session_id, second = _LEASE.unpack_from(self._memory, at)
            wanted = second % 2**_ROW_BITS
            packed = struct.unpack_from(f"{min(count, SLOTS_A_ROW)}Q", self._memory, at + _LEASE.size)
            places += [(place >> 32, (place & 0xFFFFFFFF) << _OFFSET_UNIT) for place in packed]
        return session_id, places if len(rows) == wanted else []

    # The head

    def _write_head(self, state_dir: Path) -> None:
        place = os.stat(state_dir)
        made_by = (place.st_dev, place.st_ino, os.geteuid())
        _HEAD.pack_into(self._memory, 0, MAGIC, *_LAYOUT, os.urandom(16), _boot_id(), *made_by)

    def _judge_head(self, state_dir: Path) -> None:
        values = _HEAD.unpack_from(self._memory)
        place = os.stat(state_dir)
        if values[0] != MAGIC:
            raise ForeignLedger("it is no ledger")
        if values[1:5] != _LAYOUT:
            raise ForeignLedger("it was made by a version of kvstored with another format")
        if values[6] != _boot_id():
            raise ForeignLedger("it was made before a reboot")
        if values[7:10] != (place.st_dev, place.st_ino, os.geteuid()):
            raise ForeignLedger("it belongs to another state directory")

    def _read_rows(self) -> None:
        for at in self._live_rows(_PAGE, _ARENA_BYTES, MAX_ARENAS):
            self._rows_of_arena[_U64.unpack_from(self._memory, at)[0]] = at
        for at in self._live_rows(_SESSIONS_AT, _SESSION_BYTES, MAX_SESSIONS):
            self._row_of_session[_U64.unpack_from(self._memory, at + _SESSION_ID)[0]] = at
        for at in self._live_rows(_LEASES_AT, _LEASE_BYTES, LEASE_ROWS):
            lease_id = _U64.unpack_from(self._memory, at + 8)[0] >> _ROW_BITS
            self._rows_of_lease.setdefault(lease_id, []).append(at)

    def _live_rows(self, start: int, row_bytes: int, rows: int) -> list[int]:
        """Return the offsets of the rows whose first word is not zero."""
        raw = os.pread(self.fd, rows * row_bytes, start)  # unused rows that are read in the mapping take memory
        words = np.frombuffer(raw, np.uint64)[:: row_bytes // 8]
        found: list[int] = (np.flatnonzero(words) * row_bytes + start).tolist()
        return found

    def _counter(self, offset: int) -> int:
        return int(_U64.unpack_from(self._memory, offset)[0])

    def _raise_counter(self, offset: int, value: int) -> None:
        if value > self._counter(offset):
            _U64.pack_into(self._memory, offset, value)


def tier_of_chunk(number: int) -> int:
    """Return the position of the tier to which a chunk of device memory with this number belongs."""
    return (number - DEVICE_ARENAS) // CHUNKS_A_TIER


def _counter_of(number: int) -> int:
    """Return the offset of the counter for the range that the number of an arena or chunk is in."""
    return _NEXT_ARENA if number < DEVICE_ARENAS else _NEXT_CHUNKS + 8 * tier_of_chunk(number)


def _new_memory() -> int:
    descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.fchmod(descriptor, 0o600)
    os.ftruncate(descriptor, LEDGER_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def _require_ledger(descriptor: int) -> None:
    try:
        found, seals = os.fstat(descriptor), fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        name = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError as error:
        raise ForeignLedger(f"it is no memfd: {error.strerror}") from None
    if name != f"/memfd:{_NAME} (deleted)" or seals != _SEALS:
        raise ForeignLedger(f"it is {name}")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o600:
        raise ForeignLedger(f"it belongs to uid {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}")
    if found.st_size != LEDGER_BYTES:
        raise ForeignLedger("it was made by a version of kvstored with another format")


def _boot_id() -> bytes:
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def _free_rows(start: int, row_bytes: int, rows: int, taken: Iterable[int]) -> array[int]:
    """Return the offsets of the rows that are not taken, the lowest last, so that few pages are touched."""
    every, out = range(start + (rows - 1) * row_bytes, start - 1, -row_bytes), set(taken)
    return array("I", [at for at in every if at not in out] if out else every)
