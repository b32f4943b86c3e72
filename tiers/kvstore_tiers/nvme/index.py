"""The index: key -> slab, slot, generation, in LMDB. Derived from the records, never the store.

Owns DIR/index. Loses nothing when it is lost: the records in the slabs say everything it says. So it is only ever
opened when it is known to be whole: `close` leaves a seal with the checksum of the database file, opening takes the
seal away first, and an index without a seal that holds (a crash, flipped bits) is deleted and rebuilt. LMDB does not
checksum its pages, and a damaged one can take the process down with it.
Invariants: the file never exceeds the budget it was given (LMDB's map size); a failure of LMDB disables the index
until the next start, and nothing else; an index of a newer format is refused, not deleted.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import lmdb
import xxhash

from kvstore_tiers import failpoints
from kvstore_tiers.nvme.directory import sync_directory
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

Entry = tuple[bytes, Location]


class KeyIndex:
    """The open index of a directory. `is_fresh` says that it was made anew and must be filled by `rebuild`."""

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self._lock = threading.Lock()
        self.broken = ""
        self._refuse_newer()
        self.is_fresh = not seal_holds(path) or (path / "data.mdb").stat().st_size > budget_bytes
        if self.is_fresh:
            self._delete()
        self._environment: lmdb.Environment | None = None
        try:
            self._environment = self._open()
        except lmdb.Error as error:
            self._disable(error)
        self._seal_path.unlink(missing_ok=True)  # from here on the database may change
        sync_directory(path)

    def get(self, key: bytes) -> Location | None:
        """Where the block is, as of the last commit."""
        with self._lock:
            if self._environment is None:
                return None
            with self._environment.begin(db=self._blocks) as transaction:
                raw = transaction.get(key)
        return Location(*_VALUE.unpack(raw)) if raw else None

    def entries(self) -> Iterator[Entry]:
        """All blocks in key order."""
        with self._lock:
            if self._environment is None:
                return
            with self._environment.begin(db=self._blocks) as transaction:
                for key, raw in transaction.cursor():
                    yield bytes(key), Location(*_VALUE.unpack(raw))

    def reasons(self) -> dict[tuple[int, int], str]:
        """Why slots were quarantined, by (slab, slot)."""
        with self._lock:
            if self._environment is None:
                return {}
            with self._environment.begin(db=self._quarantine) as transaction:
                return {_PLACE.unpack(place): bytes(why).decode() for place, why in transaction.cursor()}

    def count(self) -> int:
        """How many blocks the index names."""
        with self._lock:
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
        with self._lock:
            if self._environment is None:
                return
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

    def rebuild(self, sorted_entries: Iterable[Entry]) -> None:
        """Fill a fresh index from the records, in key order."""
        with self._lock:
            if self._environment is None:
                return
            packed = ((key, _VALUE.pack(at.slab, at.index, at.generation)) for key, at in sorted_entries)
            try:
                with self._environment.begin(write=True) as transaction:
                    transaction.drop(self._blocks, delete=False)
                    with transaction.cursor(self._blocks) as cursor:
                        cursor.putmulti(packed, append=True)
                self.is_fresh = False
            except (lmdb.Error, OSError) as error:
                self._disable(error)

    def close(self) -> None:
        """Close, and vouch for the database file if it is whole. Idempotent."""
        with self._lock:
            if self._environment is None:
                return
            self._environment.sync(True)
            self._environment.close()
            self._environment = None
            if self.is_fresh:
                return
            failpoints.hit("nvme.index-seal")
            write_seal(self._path)

    @property
    def _seal_path(self) -> Path:
        return self._path / "seal"

    def _refuse_newer(self) -> None:
        version_path = self._path / "version"
        if version_path.exists():
            found = version_path.read_text(errors="replace").strip()
            if found != str(INDEX_FORMAT_VERSION):
                raise FormatUnsupported(str(self._path), found, INDEX_FORMAT_VERSION)
        else:
            version_path.write_text(f"{INDEX_FORMAT_VERSION}\n")

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
