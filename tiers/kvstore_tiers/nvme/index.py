"""The index: key -> slab, slot, generation, in LMDB. Derived from the records, never the store.

Owns DIR/index. Loses nothing when it is lost: the records in the slabs say everything it says, and nobody who is served
waits for it. So it is only ever opened when it is known to be whole: `close` leaves a seal (index_seal.py) where all
that was committed is in it, and an index without a seal that holds (a crash, flipped bits) is deleted and rebuilt. LMDB
does not checksum its pages, and a damaged one can take the process down with it.
The seal also says that no record waits to be synced. So it is gone before a record changes; its bytes are kept, since a
large index is checked, opened and rebuilt by a thread of its own, a slice at a time, while commits only leave a note.
Before each transaction its file is looked at: one that somebody else wrote to, or cut, is never touched again.
Invariants: the file never exceeds the budget it was given (LMDB's map size); a failure of LMDB disables the index
until the next start, and nothing else; an index of a newer format is refused, not deleted; what is committed while it
is rebuilt is newer than what it is rebuilt from, and stays; an index whose mending did not end is not sealed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from kvstore_tiers import failpoints
from kvstore_tiers.heap import trim
from kvstore_tiers.nvme.directory import sync_directory
from kvstore_tiers.nvme.errors import FormatUnsupported
from kvstore_tiers.nvme.index_database import delete_database, look_of, open_database, refuse_newer
from kvstore_tiers.nvme.index_mending import Commit, Entry, IndexColumns, PackedEntries, PendingChanges, packed
from kvstore_tiers.nvme.index_seal import PLACE, VALUE, seal_holds, told_seal, write_seal
from kvstore_tiers.nvme.slab import Location

BASE_BUDGET_BYTES = 512 * 1024
BUDGET_BYTES_PER_SLOT = 384  # 52 bytes an entry, half-full pages, and three generations of copied pages
_SEQUENCE_KEY = b"sequence"
OPEN_AT_ONCE_BYTES = 4 << 20  # checked within some milliseconds
MEND_AT_ONCE_BLOCKS = 4096  # so many take some milliseconds; more are mended while others are served
MEND_DELAY_S = 1.0  # a daemon has better things to do in its first second
_MEND_SLICE = 4096  # a transaction, during which a group commit has to wait
_MEND_STEP = 256  # puts without giving way to the control thread: about 0.2 ms
_MEND_PAUSE_S = 0.002
_LOG = logging.getLogger(__name__)


class KeyIndex:
    """The index of a directory. `is_fresh`: it was made anew and is not filled yet; `was_sealed`: the last process
    closed it, and with it the tier.
    """

    def __init__(self, path: Path, budget_bytes: int) -> None:
        self._path = path
        self._budget_bytes = budget_bytes
        self._lock = threading.RLock()  # the database; taken for long while it is checked
        self._noting = threading.Lock()  # the pending changes, the budget, and the moment in which it is open
        self._pending = PendingChanges()
        self._mended = threading.Event()  # nothing is missing for want of mending
        self._mended.set()
        self._closing = threading.Event()
        self._mender: threading.Thread | None = None
        self._environment: lmdb.Environment | None = None
        self._as_left = (0, 0, 0)  # how the database looked after our last change
        self._is_opened = False
        self._is_whole = True  # it says what the records say, but for commits that are yet to come
        self._blocks_at_opening = 0
        self._seal_is_taken = False
        self.is_fresh = False
        self.broken = ""
        self._told_seal = told_seal(path)
        if not refuse_newer(path):
            _LOG.warning("%s is damaged: the index is rebuilt from the records", path / "version")
            self._told_seal = None
        self.was_sealed = self._told_seal is not None
        if not self._database.exists() or self._database.stat().st_size <= OPEN_AT_ONCE_BYTES:
            with self._lock:
                self._open_once()

    # -- the seal ----------------------------------------------------------------------------------------------------

    def take_seal(self) -> None:
        """From here on records may change: without the seal the next start syncs them, and rebuilds the index.

        What the seal said is kept: the database is judged by it when it is opened.
        """
        with self._lock:
            if not self._seal_is_taken:
                (self._path / "seal").unlink(missing_ok=True)
                sync_directory(self._path)  # also for a process that was killed before it came to that
                self._seal_is_taken = True

    def unseal(self) -> None:
        """The index is known to be wrong: as `take_seal`, and what the seal said means nothing any more."""
        with self._lock:
            self._told_seal = None
            self.take_seal()

    def reset(self, budget_bytes: int) -> None:
        """Make it anew, within a smaller budget. Before it is mended."""
        with self._lock:
            self.unseal()
            if self._environment is not None:
                self._environment.close()
                self._environment = None
            self._budget_bytes = budget_bytes
            self._is_opened = False
            delete_database(self._path)
            self._open_once()

    # -- mending -----------------------------------------------------------------------------------------------------

    def mend(self, columns: IndexColumns, budget_bytes: int, *, untouched: bool) -> bool:
        """Make the index say what `columns` say, unless it is sealed and they are what it was sealed with (`untouched`,
        and as many). Many blocks are mended later, by a thread, as is a large database; then False. Else, whether it
        was rebuilt.
        """
        if self._is_opened and self._says(columns, untouched):
            return False
        self._is_whole = False
        if self._is_opened and len(columns.key) <= MEND_AT_ONCE_BLOCKS:
            return self._mend(columns, budget_bytes, untouched)
        self._mended.clear()
        todo = [columns]  # which the thread empties, so that nobody else keeps the columns
        arguments = (todo, budget_bytes, untouched)
        self._mender = threading.Thread(target=self._mend_later, args=arguments, name="nvme-index", daemon=True)
        self._mender.start()
        return False

    @property
    def is_mended(self) -> bool:
        """Whether it can be asked without waiting."""
        return self._mended.is_set()

    def wait_mended(self) -> None:
        """Until the index says what it should."""
        self._mended.wait()

    # -- asking ------------------------------------------------------------------------------------------------------

    def get(self, key: bytes) -> Location | None:
        """Where the block is, as of the last commit."""
        self._mended.wait()
        raw = None
        with self._opened(), self._transaction() as transaction:
            if transaction is not None:
                raw = transaction.get(key, db=self._blocks)
        return Location(*VALUE.unpack(raw)) if raw else None

    def entries(self) -> Iterator[Entry]:
        """All blocks in key order."""
        self._mended.wait()
        with self._opened(), self._transaction() as transaction:
            if transaction is not None:
                for key, raw in transaction.cursor(self._blocks):
                    yield bytes(key), Location(*VALUE.unpack(raw))

    def reasons(self) -> dict[tuple[int, int], str]:
        """Why slots were quarantined, by (slab, slot)."""
        self._mended.wait()
        found: dict[tuple[int, int], str] = {}
        with self._opened(), self._transaction() as transaction:
            if transaction is not None:
                for place, why in transaction.cursor(self._quarantine):
                    found[PLACE.unpack(place)] = bytes(why).decode(errors="replace")
        return found

    # -- changing ----------------------------------------------------------------------------------------------------

    def resize(self, budget_bytes: int) -> None:
        """Let the index grow to `budget_bytes`; it never shrinks before the next start."""
        with self._noting:
            if budget_bytes <= self._budget_bytes:
                return
            self._budget_bytes = budget_bytes
            if self._is_waiting:
                return  # it is opened with this budget
        with self._lock:
            self._fit_map()

    def apply(
        self,
        published: Iterable[Entry],
        withdrawn: Iterable[Entry],
        reasons: dict[tuple[int, int], str],
        sequence: int,
    ) -> None:
        """One transaction. A withdrawn block is removed only if the index still names that very place."""
        commit = Commit(list(published), list(withdrawn), dict(reasons), sequence)
        with self._noting:
            if not self._mended.is_set():
                self._pending.note(commit)
            if self._is_waiting:
                self._pending.commits.append(commit)
                return
        with self._opened(), self._transaction(write=True) as transaction:
            if transaction is not None:
                self._enter(transaction, commit)
                failpoints.hit("nvme.before-index-commit")

    def close(self, *, vouch: bool = True) -> None:
        """Close, and seal the index if it is whole and the caller vouches that all records are synced. Idempotent.

        Raises OSError where the seal cannot be written; it is closed all the same.
        """
        self._closing.set()
        if self._mender is not None:
            self._mender.join()
        with self._lock:
            if self._environment is None:  # nor is it opened now: what was not needed is as its last user left it
                seal, self._told_seal = self._told_seal, None
                if vouch and seal is not None and not self._pending.commits:
                    write_seal(self._path, seal)
                return
            environment, self._environment = self._environment, None
            vouch = vouch and self._is_as_left()
            try:
                environment.sync(True)
            except lmdb.Error as error:
                raise OSError(str(error)) from error  # not sealed, so the next start rebuilds it
            finally:
                environment.close()
            if self.is_fresh or not self._is_whole or not vouch:
                return
            failpoints.hit("nvme.index-seal")
            write_seal(self._path)

    # -- the mender --------------------------------------------------------------------------------------------------

    def _mend_later(self, todo: list[IndexColumns], budget_bytes: int, untouched: bool) -> None:
        try:
            if not self._closing.wait(MEND_DELAY_S):
                self._mend(todo.pop(), budget_bytes, untouched)
        except (lmdb.Error, OSError) as error:
            with self._lock:
                self._disable(error)
        finally:
            with self._noting:
                self._mended.set()
                self._pending = PendingChanges(self._pending.commits)
            trim()

    def _mend(self, columns: IndexColumns, budget_bytes: int, untouched: bool) -> bool:
        with self._lock:
            self._open_database()
            is_right = self._says(columns, untouched)
            with self._noting:
                self._budget_bytes = max(self._budget_bytes, budget_bytes)
                self._begin_mending(is_right)
                self._is_opened = True
            if is_right:
                self._is_whole = True
                return False
        entries, blocks = columns.packed(), len(columns.key)
        for first in range(0, blocks, _MEND_SLICE):
            if self._closing.wait(_MEND_PAUSE_S if blocks > MEND_AT_ONCE_BLOCKS else 0) or not self._fill(
                entries, first, min(first + _MEND_SLICE, blocks)
            ):
                return False
        with self._lock:
            self.is_fresh = False
            self._is_whole = True
            if self._environment is not None and blocks > MEND_AT_ONCE_BLOCKS:
                self._environment.close()  # gives back the pages that were written
                self._environment = self._open()
        return True

    def _says(self, columns: IndexColumns, untouched: bool) -> bool:
        """Whether it is the index of these blocks; commits that came since it was opened are not counted."""
        return untouched and not self.is_fresh and self._blocks_at_opening == len(columns.key)

    def _begin_mending(self, is_right: bool) -> None:
        """Under both locks: empty it if it is wrong, and enter the commits that only left a note."""
        self._fit_map()
        self.is_fresh = self.is_fresh or not is_right
        with self._transaction(write=True) as transaction:
            if transaction is None:
                return
            if not is_right:
                transaction.drop(self._blocks, delete=False)
                for key, value in self._pending.newer.items():
                    if value:
                        transaction.put(key, value, db=self._blocks)
            for commit in self._pending.commits:
                self._enter(transaction, commit)
        self._pending.commits.clear()

    def _fill(self, entries: PackedEntries, first: int, last: int) -> bool:
        """Enter what the blocks from `first` to `last` say, but for what commits know better."""
        with self._lock:
            with self._transaction(write=True) as transaction:
                if transaction is None:
                    return False
                with transaction.cursor(self._blocks) as cursor:
                    for begin in range(first, last, _MEND_STEP):
                        part = entries.part(begin, min(begin + _MEND_STEP, last))
                        with self._noting:
                            part = self._pending.without_older(part)
                        cursor.putmulti(part)
                        time.sleep(0)  # lets whoever waits for the GIL have it
            return self._environment is not None

    # -- the database ------------------------------------------------------------------------------------------------

    @property
    def _is_waiting(self) -> bool:
        """It is yet to be opened by the mender: nobody else opens it, and nobody waits for that."""
        return not self._is_opened and not self._mended.is_set()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with self._lock:
            self._open_once()
            yield

    @contextmanager
    def _transaction(self, *, write: bool = False) -> Iterator[lmdb.Transaction | None]:
        """Under the lock; None where the index is off. What fails in it switches the index off, and ends there."""
        begun = self._begun(write)
        if begun is None:
            yield None
            return
        try:
            with begun as transaction:
                yield transaction
            if write:
                self._as_left = look_of(self._path)
        except (lmdb.Error, OSError) as error:
            self._disable(error)

    def _is_as_left(self) -> bool:
        try:
            return look_of(self._path) == self._as_left
        except OSError:
            return False

    def _begun(self, write: bool) -> lmdb.Transaction | None:
        try:
            if self._environment is not None and not self._is_as_left():
                raise OSError("somebody else changed its file")
            return None if self._environment is None else self._environment.begin(write=write)
        except (lmdb.Error, OSError) as error:
            self._disable(error)
            return None

    def _open_once(self) -> None:
        """Under the lock."""
        if not self._is_opened:
            self._open_database()
            self._is_opened = True

    def _open_database(self) -> None:
        """Open it, under the lock, if it is not open. Only now is it known whether the seal holds."""
        if self._is_opened:
            return
        sealed = self._told_seal is not None and seal_holds(self._path, self._told_seal)
        self.is_fresh = not sealed or self._database.stat().st_size > self._budget_bytes
        if self.is_fresh:
            self.unseal()
            delete_database(self._path)
        try:
            self._environment = self._open()
            with self._environment.begin() as transaction:
                self._blocks_at_opening = int(transaction.stat(self._blocks)["entries"])
        except lmdb.Error as error:
            self._disable(error)
        except FormatUnsupported as error:  # a version file that is older than the database: it keeps its seal
            if self._mender is None:
                raise
            self.broken = f"the index is off: {error}"
            return
        self.unseal()  # from here on the database may change

    def _enter(self, transaction: lmdb.Transaction, commit: Commit) -> None:
        for key, location in commit.withdrawn:
            if transaction.get(key, db=self._blocks) == packed(location):
                transaction.delete(key, db=self._blocks)
            transaction.delete(PLACE.pack(location.slab, location.index), db=self._quarantine)
        for key, location in commit.published:
            transaction.put(key, packed(location), db=self._blocks)
        for place, why in commit.reasons.items():
            transaction.put(PLACE.pack(*place), why.encode()[:256], db=self._quarantine)
        transaction.put(_SEQUENCE_KEY, commit.sequence.to_bytes(8, "little"), db=self._meta)

    def _fit_map(self) -> None:
        if self._environment is not None:
            try:
                self._environment.set_mapsize(self._budget_bytes)
            except lmdb.Error as error:
                self._disable(error)

    @property
    def _database(self) -> Path:
        return self._path / "data.mdb"

    def _open(self) -> lmdb.Environment:
        environment, self._blocks, self._quarantine, self._meta = open_database(self._path, self._budget_bytes)
        self._as_left = look_of(self._path)
        return environment

    def _disable(self, error: Exception) -> None:
        self.broken = f"the index is off until the next start: {error}"
        self._is_opened = True  # and stays closed
        if self._environment is not None:
            self._environment.close()
            self._environment = None
        delete_database(self._path)
