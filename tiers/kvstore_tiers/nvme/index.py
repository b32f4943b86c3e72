"""The index: key -> slab, slot, generation, in LMDB. Derived from the records, never the store.

Owns DIR/index. Loses nothing when it is lost: the records in the slabs say everything it says, and nobody who is served
waits for it. So it is only ever opened when it is known to be whole: `close` leaves a seal with the checksum of the
database file, opening takes the seal away first, and an index without a seal that holds (a crash, flipped bits) is
deleted and rebuilt. LMDB does not checksum its pages, and a damaged one can take the process down with it.
A large index is checked, opened and rebuilt by a thread of its own, a slice at a time; whoever asks it for something
waits for as much of that as the answer needs.
Invariants: the file never exceeds the budget it was given (LMDB's map size); a failure of LMDB disables the index
until the next start, and nothing else; an index of a newer format is refused, not deleted; what is committed while it
is rebuilt is newer than what it is rebuilt from, and stays; an index whose rebuilding did not end is not sealed.
"""

from __future__ import annotations

import json
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import xxhash

from kvstore_tiers import failpoints
from kvstore_tiers.heap import trim
from kvstore_tiers.nvme.directory import sync_directory, write_durably
from kvstore_tiers.nvme.errors import FormatUnsupported
from kvstore_tiers.nvme.slab import Location

INDEX_FORMAT_VERSION = 1
BASE_BUDGET_BYTES = 512 * 1024
BUDGET_BYTES_PER_SLOT = 384  # 52 bytes an entry, half-full pages, and three generations of copied pages
_VERSION_KEY = b"format_version"
_SEQUENCE_KEY = b"sequence"
_VALUE = struct.Struct("<IIQ")
_PLACE = struct.Struct("<II")
_HASH_CHUNK_BYTES = 1 << 20
_KEY_BYTES = 16
OPEN_AT_ONCE_BYTES = 4 << 20  # checked within some milliseconds
MEND_AT_ONCE_BLOCKS = 4096  # so many take some milliseconds; more are mended while others are served
MEND_DELAY_S = 1.0  # a daemon has better things to do in its first second
_MEND_SLICE = 4096  # a transaction, during which a group commit has to wait
_MEND_STEP = 256  # puts without giving way to the control thread: about 0.2 ms
_MEND_PAUSE_S = 0.002

Entry = tuple[bytes, Location]


@dataclass
class IndexColumns:
    """What an index should say, a column each. `key` is two little-endian words."""

    key: npt.NDArray[Any]
    slab: npt.NDArray[Any]
    slot: npt.NDArray[Any]
    generation: npt.NDArray[Any]

    def packed(self) -> tuple[bytes, bytes]:
        """Keys in their order, and the values, each joined."""
        order = np.lexsort(self.key.astype("<u8").byteswap().T[::-1])
        values = np.empty(len(order), [("slab", "<u4"), ("slot", "<u4"), ("generation", "<u8")])
        values["slab"], values["slot"], values["generation"] = self.slab, self.slot, self.generation
        return self.key[order].tobytes(), values[order].tobytes()


class KeyIndex:
    """The index of a directory. `is_fresh`: it was made anew and is not filled yet; `was_sealed`: the last process
    closed it, and with it the tier.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self._lock = threading.RLock()
        self._mended = threading.Event()  # nothing is missing for want of rebuilding
        self._mended.set()
        self._closing = threading.Event()
        self._mender: threading.Thread | None = None
        self._newer: dict[bytes, bytes] = {}  # what commits entered while the index waits to be mended or is
        self._gone: set[bytes] = set()  # and took out: key and value
        self._environment: lmdb.Environment | None = None
        self._is_opened = False
        self.is_fresh = False
        self.broken = ""
        self._refuse_newer()
        self.was_sealed = self._seal_path.exists()
        if not self._database.exists() or self._database.stat().st_size <= OPEN_AT_ONCE_BYTES:
            self._open_once()

    def mend(self, columns: IndexColumns, budget_bytes: int, *, untouched: bool) -> bool:
        """Make the index say what `columns` say, unless it is sealed and they are what it was sealed with (`untouched`,
        and as many). Many blocks are mended later, by a thread; then False. Else, whether it was rebuilt.
        """
        if len(columns.key) <= MEND_AT_ONCE_BLOCKS:
            return self._mend(columns, budget_bytes, untouched)
        self._mended.clear()
        todo = [columns]  # which the thread empties, so that nobody else keeps the columns
        arguments = (todo, budget_bytes, untouched)
        self._mender = threading.Thread(target=self._mend_later, args=arguments, name="nvme-index", daemon=True)
        self._mender.start()
        return False

    def unseal(self) -> None:
        """The records are about to change: what the index says of them is not vouched for any more."""
        with self._lock:
            self._seal_path.unlink(missing_ok=True)
            sync_directory(self._path)

    def wait_mended(self) -> None:
        """Until the index says what it should."""
        self._mended.wait()

    def get(self, key: bytes) -> Location | None:
        """Where the block is, as of the last commit."""
        self._mended.wait()
        with self._opened():
            if self._environment is None:
                return None
            with self._environment.begin(db=self._blocks) as transaction:
                raw = transaction.get(key)
        return Location(*_VALUE.unpack(raw)) if raw else None

    def entries(self) -> Iterator[Entry]:
        """All blocks in key order."""
        self._mended.wait()
        with self._opened():
            if self._environment is None:
                return
            with self._environment.begin(db=self._blocks) as transaction:
                for key, raw in transaction.cursor():
                    yield bytes(key), Location(*_VALUE.unpack(raw))

    def reasons(self) -> dict[tuple[int, int], str]:
        """Why slots were quarantined, by (slab, slot)."""
        with self._opened():
            if self._environment is None:
                return {}
            with self._environment.begin(db=self._quarantine) as transaction:
                return {_PLACE.unpack(place): bytes(why).decode() for place, why in transaction.cursor()}

    def count(self) -> int:
        """How many blocks the index names, as far as it is rebuilt."""
        with self._opened():
            if self._environment is None:
                return 0
            with self._environment.begin() as transaction:
                return int(transaction.stat(self._blocks)["entries"])

    def resize(self, budget_bytes: int) -> None:
        """Let the index grow to `budget_bytes`; it never shrinks before the next start."""
        with self._lock:
            if budget_bytes > self._budget_bytes:
                self._budget_bytes = budget_bytes
                if self._environment is not None:
                    self._environment.set_mapsize(budget_bytes)

    def apply(
        self,
        published: Iterable[Entry],
        withdrawn: Iterable[Entry],
        reasons: dict[tuple[int, int], str],
        sequence: int,
    ) -> None:
        """One durable transaction. A withdrawn block is removed only if the index still names that very place."""
        with self._opened():
            if self._environment is None:
                return
            published, withdrawn = list(published), list(withdrawn)
            if not self._mended.is_set():
                self._note_changes(published, withdrawn)
            try:
                with self._environment.begin(write=True) as transaction:
                    for key, location in withdrawn:
                        value = _VALUE.pack(location.slab, location.index, location.generation)
                        if transaction.get(key, db=self._blocks) == value:
                            transaction.delete(key, db=self._blocks)
                        transaction.delete(_PLACE.pack(location.slab, location.index), db=self._quarantine)
                    for key, location in published:
                        value = _VALUE.pack(location.slab, location.index, location.generation)
                        transaction.put(key, value, db=self._blocks)
                    for place, why in reasons.items():
                        transaction.put(_PLACE.pack(*place), why.encode()[:256], db=self._quarantine)
                    transaction.put(_SEQUENCE_KEY, sequence.to_bytes(8, "little"), db=self._meta)
                    failpoints.hit("nvme.before-index-commit")
            except (lmdb.Error, OSError) as error:
                self._disable(error)

    def close(self) -> None:
        """Close, and vouch for the database file if it is whole. Idempotent. Raises OSError where that cannot be
        written; it is closed all the same."""
        self._closing.set()
        if self._mender is not None:
            self._mender.join()
        with self._lock:
            if self._environment is None:  # nor is one opened now: what was not needed is as its last user left it
                return
            environment, self._environment = self._environment, None
            try:
                environment.sync(True)
            except lmdb.Error as error:
                raise OSError(str(error)) from error  # not sealed, so the next start rebuilds it
            finally:
                environment.close()
            if self.is_fresh:
                return
            failpoints.hit("nvme.index-seal")
            write_seal(self._path)

    # -- mending -----------------------------------------------------------------------------------------------------

    def _mend_later(self, todo: list[IndexColumns], budget_bytes: int, untouched: bool) -> None:
        try:
            if not self._closing.wait(MEND_DELAY_S):
                self._mend(todo.pop(), budget_bytes, untouched)
        except (lmdb.Error, OSError) as error:
            with self._lock:
                self._disable(error)
        finally:
            with self._lock:
                self._mended.set()
                self._newer, self._gone = {}, set()
            trim()

    def _note_changes(self, published: Iterable[Entry], withdrawn: Iterable[Entry]) -> None:
        for key, location in withdrawn:
            value = _VALUE.pack(location.slab, location.index, location.generation)
            self._gone.add(key + value)
            if self._newer.get(key) == value:
                del self._newer[key]
        for key, location in published:
            self._newer[key] = _VALUE.pack(location.slab, location.index, location.generation)

    def _mend(self, columns: IndexColumns, budget_bytes: int, untouched: bool) -> bool:
        with self._opened():
            if untouched and not self.is_fresh and self.count() == len(columns.key):
                return False
            self.resize(budget_bytes)
            self.is_fresh = True
            if self._environment is not None:
                with self._environment.begin(write=True) as transaction:
                    transaction.drop(self._blocks, delete=False)
                    for entry in self._newer.items():
                        transaction.put(*entry, db=self._blocks)
        keys, values = columns.packed()
        blocks = len(columns.key)
        for first in range(0, blocks, _MEND_SLICE):
            if self._closing.wait(_MEND_PAUSE_S if blocks > MEND_AT_ONCE_BLOCKS else 0) or not self._fill(
                keys, values, first, min(first + _MEND_SLICE, blocks)
            ):
                return False
        with self._lock:
            self.is_fresh = False
            if self._environment is not None and blocks > MEND_AT_ONCE_BLOCKS:
                self._environment.close()  # gives back the pages that were written
                self._environment = self._open()
        return True

    def _fill(self, keys: bytes, values: bytes, first: int, last: int) -> bool:
        """Enter what the blocks from `first` to `last` say, but for what commits know better."""
        with self._lock:
            if self._environment is None:
                return False
            try:
                with self._environment.begin(write=True) as transaction, transaction.cursor(self._blocks) as cursor:
                    for begin in range(first, last, _MEND_STEP):
                        places = [at * _KEY_BYTES for at in range(begin, min(begin + _MEND_STEP, last))]
                        entries = [(keys[at : at + _KEY_BYTES], values[at : at + _VALUE.size]) for at in places]
                        if self._newer or self._gone:
                            entries = [e for e in entries if e[0] not in self._newer and e[0] + e[1] not in self._gone]
                        cursor.putmulti(entries)
                        time.sleep(0)  # lets whoever waits for the GIL have it
            except (lmdb.Error, OSError) as error:
                self._disable(error)
                return False
        return True

    # -- opening -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            try:
                self._open_once()
            except FormatUnsupported as error:  # a version file that is older than the database
                self.broken = f"the index is off: {error}"
            yield

    def _open_once(self) -> None:
        """Open the database, under the lock. Only now is it known whether the seal holds."""
        if self._is_opened:
            return
        self._is_opened = True
        self.is_fresh = not seal_holds(self._path) or self._database.stat().st_size > self._budget_bytes
        if self.is_fresh:
            self._delete()
        try:
            self._environment = self._open()
        except lmdb.Error as error:
            self._disable(error)
        self.unseal()  # from here on the database may change

    @property
    def _database(self) -> Path:
        return self._path / "data.mdb"

    @property
    def _seal_path(self) -> Path:
        return self._path / "seal"

    def _refuse_newer(self) -> None:
        version_path = self._path / "version"
        found = version_path.read_text(errors="replace").strip("\0 \n") if version_path.exists() else ""
        if not found:  # none, or one whose bytes a power loss took: nothing newer vouches for itself
            write_durably(version_path, f"{INDEX_FORMAT_VERSION}\n")
        elif found != str(INDEX_FORMAT_VERSION):
            raise FormatUnsupported(str(self._path), found, INDEX_FORMAT_VERSION)

    def _open(self) -> lmdb.Environment:
        environment = lmdb.open(
            str(self._path),
            map_size=self._budget_bytes,
            max_dbs=3,
            mode=0o600,
            readahead=False,
            meminit=False,
        )
        self._blocks = environment.open_db(b"blocks")
        self._quarantine = environment.open_db(b"quarantine")
        self._meta = environment.open_db(b"meta")
        with environment.begin(write=True, db=self._meta) as transaction:
            version = bytes(transaction.get(_VERSION_KEY) or b"").decode(errors="replace")
            if not version:
                transaction.put(_VERSION_KEY, str(INDEX_FORMAT_VERSION).encode())
        if version not in ("", str(INDEX_FORMAT_VERSION)):
            environment.close()
            raise FormatUnsupported(str(self._path), version, INDEX_FORMAT_VERSION)
        return environment

    def _disable(self, error: Exception) -> None:
        self.broken = f"the index is off until the next start: {error}"
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        self._delete()

    def _delete(self) -> None:
        for name in ("data.mdb", "lock.mdb"):
            (self._path / name).unlink(missing_ok=True)


def write_seal(path: Path) -> None:
    """Vouch for the index in this directory as it is now."""
    database = path / "data.mdb"
    temporary = path / "seal.new"
    temporary.write_text(json.dumps({"bytes": database.stat().st_size, "xxh3_64": _checksum(database)}))
    temporary.replace(path / "seal")


def seal_holds(path: Path) -> bool:
    """Whether the index in this directory was closed cleanly and not one bit changed since."""
    database = path / "data.mdb"
    try:
        seal = json.loads((path / "seal").read_bytes())
        return bool(database.stat().st_size == seal["bytes"] and _checksum(database) == seal["xxh3_64"])
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _checksum(path: Path) -> int:
    digest = xxhash.xxh3_64()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.intdigest()


def read_sealed(path: Path) -> dict[bytes, Location] | None:
    """All blocks of a cleanly closed index, read without changing it; None when it has no seal that holds."""
    database = path / "data.mdb"
    if not seal_holds(path):
        return None
    with lmdb.open(str(path), map_size=database.stat().st_size, max_dbs=3, readonly=True, lock=False) as environment:
        blocks = environment.open_db(b"blocks", create=False)
        with environment.begin(db=blocks) as transaction:
            return {bytes(key): Location(*_VALUE.unpack(raw)) for key, raw in transaction.cursor()}


def read_sealed_reasons(path: Path) -> dict[tuple[int, int], str] | None:
    """Why slots are in quarantine, by (slab, slot), as `read_sealed`."""
    database = path / "data.mdb"
    if not seal_holds(path):
        return None
    with lmdb.open(str(path), map_size=database.stat().st_size, max_dbs=3, readonly=True, lock=False) as environment:
        quarantine = environment.open_db(b"quarantine", create=False)
        with environment.begin(db=quarantine) as transaction:
            return {_PLACE.unpack(place): bytes(why).decode() for place, why in transaction.cursor()}
