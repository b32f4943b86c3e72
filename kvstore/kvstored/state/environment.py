"""The environment is one LMDB file. This module checks the file before LMDB opens it, writes the file in transactions,
and rewrites the whole file when deleted entries must become unreadable.

The check never gives the file's bytes to LMDB. The file is STATE_DIR/state-NUMBER.mdb; the file with the highest number
counts. A new file is made under another name and then renamed, so a crash leaves either the old file or the new one,
whole. A file that is damaged or has another format is renamed to `state.aside`; there is at most one such file. The
module never decides when to save.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import lmdb

from kvstored.state.databases import DATABASES, FORMAT, FORMAT_KEY, KEY_KEY, WRITER_KEY
from kvstored.state.pages import Unusable, require_whole
from kvstored.state.seals import CHECKSUMS, Encryption, Seals

PREFIX, SUFFIX, LOCK, NEW, ASIDE = "state-", ".mdb", "-lock", ".new", "state.aside"
FIRST_MAP_BYTES, MAX_MAP_BYTES = 1 << 30, 1 << 36
CHECKS = 5  # of a file that may be written meanwhile
Entry = tuple[bytes, bytes]
Keys = Mapping[str, bytes]  # by number, in hexadecimal; the newest last
NO_KEYS: Keys = {}
Opened = dict[str, Any]  # LMDB's handles, by the names of databases
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)
_LOCK_BYTES = 8192  # as many as `max_readers` need: LMDB maps them, and a page without room would end the process


def number_of(path: Path) -> int:
    """Return the number in the name of the state file `path`, or -1 for any other file."""
    digits = path.name.removeprefix(PREFIX).removesuffix(SUFFIX)
    is_one = digits.isdecimal() and path == path_of(path.parent, int(digits))
    return int(digits) if is_one else -1


def newest(directory: Path) -> Path | None:
    """Return the state file with the highest number in `directory`, or None when there is none. Raises OSError."""
    numbers = [number for each in directory.glob(f"{PREFIX}*{SUFFIX}") if (number := number_of(each)) >= 0]
    return path_of(directory, max(numbers)) if numbers else None


def path_of(directory: Path, number: int) -> Path:
    return directory / f"{PREFIX}{number:06d}{SUFFIX}"


def _make_room(lock: Path) -> None:
    """Extend a lock file to `_LOCK_BYTES`. Raises OSError when the medium has no room for them."""
    try:
        lock.touch()
    except PermissionError:
        lock.unlink()  # of another user, who looked at the file while no daemon ran
    with open(lock, "ab") as file:
        file.write(bytes(max(0, _LOCK_BYTES - file.tell())))


def as_os_error(error: lmdb.Error, path: Path) -> OSError:
    """Return an LMDB error as an OSError, with the error number of the operating system or EIO."""
    code = error.code if 0 < error.code < 200 else errno.EIO
    if isinstance(error, lmdb.MapFullError):
        code = errno.ENOSPC
    return OSError(code, os.strerror(code) if code != errno.EIO else str(error), str(path))


class Environment:
    """An open LMDB environment with the databases of small state. Its constructor raises Unusable and OSError. `seals`
    is None when the entries are encrypted with none of `keys`."""

    def __init__(
        self, path: Path, *, create: bool = False, readonly: bool = False, shared: bool = False, keys: Keys = NO_KEYS
    ) -> None:
        """Open the file. `readonly`: the medium cannot be written, and no other process has the file open. `shared`:
        another process has the file open and writes to it; this process only reads."""
        self.path, self.keys = path, keys
        self.seals: Seals | None = CHECKSUMS
        self.is_readonly = readonly or shared
        nbytes = path.stat().st_size if path.exists() else 0
        self.map_bytes = max(FIRST_MAP_BYTES, 2 ** (2 * nbytes).bit_length())
        mask = os.umask(0o077)
        try:
            if not self.is_readonly:
                _make_room(path.with_name(path.name + LOCK))
            self._lmdb = lmdb.open(
                str(path), subdir=False, lib_version=1, map_size=self.map_bytes, max_dbs=len(DATABASES) + 8,
                metasync=False, readahead=False, max_readers=32, create=create, readonly=self.is_readonly,
                lock=not readonly, mode=0o600,
            )  # fmt: skip
            self._databases = self._open_databases(create)
            self.unlock()
        except (lmdb.CorruptedError, lmdb.InvalidError, lmdb.VersionMismatchError, lmdb.PageNotFoundError) as error:
            raise Unusable(f"damaged: {error}") from None
        except lmdb.Error as error:
            raise as_os_error(error, path) from None
        finally:
            os.umask(mask)

    def _open_databases(self, create: bool) -> Opened:
        opened: Opened = {}
        for each in DATABASES:
            try:
                opened[each.name] = self._lmdb.open_db(each.name.encode(), create=create or not self.is_readonly)
            except (lmdb.NotFoundError, lmdb.ReadonlyError):
                continue
        return opened

    def unlock(self) -> None:
        """Choose the seals of the entries, as the database `about` says."""
        self.key = (dict(self.read("about")).get(KEY_KEY) or b"").decode(errors="replace")
        if self.key:
            self.seals = Encryption(self.keys[self.key]) if self.key in self.keys else None

    def seals_of(self, name: str) -> Seals:
        """Return the seals of the database `name`. Raises Unusable when it is encrypted and there is no key."""
        seals = CHECKSUMS if name == "about" else self.seals
        if seals is None:
            raise Unusable("its entries are encrypted; a daemon with the key shows them: kvctl state show")
        return seals

    def read(self, name: str, first: bytes = b"") -> Iterator[tuple[bytes, bytes | None]]:
        """Yield the entries of the database `name` in the order of their keys in the file, from the key `first` on. A
        value is None where it is damaged. Raises Unusable."""
        if name not in self._databases:
            return
        seals = self.seals_of(name)
        first = seals.name(name, first)
        with self._lmdb.begin(db=self._databases[name]) as reading, reading.cursor() as cursor:
            if not (cursor.set_range(first) if first else cursor.first()):
                return
            for stored_key, value in cursor:
                key = seals.named(name, stored_key)
                yield key, seals.unsealed(name, key, value)

    def sizes(self) -> dict[str, tuple[int, int]]:
        """Return the number of entries and the bytes of each database, by name."""
        found = {}
        with self._lmdb.begin() as reading:
            for name, database in self._databases.items():
                stat = reading.stat(database)
                pages = stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
                found[name] = stat["entries"], pages * stat["psize"]
        return found

    def copy(self, path: Path) -> None:
        """Write a copy of the file to `path`, as a backup. Another process may write meanwhile."""
        self._lmdb.copy(str(path))

    def begin(self) -> Writing:
        """Return a new transaction. Raises OSError."""
        if self.is_readonly:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self.path))
        with suppress(lmdb.Error):
            self._lmdb.reader_check()  # one that was killed would keep every page from being used again
        try:
            return Writing(self, self._lmdb.begin(write=True), self._databases)
        except lmdb.Error as error:
            raise as_os_error(error, self.path) from None

    def sync(self) -> None:
        self._lmdb.sync(True)

    def grow(self) -> None:
        """Double the file's maximum size, after a transaction did not fit. Raises Unusable at the greatest size."""
        if self.map_bytes >= MAX_MAP_BYTES:
            raise Unusable(f"full: it has {self.map_bytes} bytes")
        self.map_bytes *= 2
        self._lmdb.set_mapsize(self.map_bytes)

    def close(self) -> None:
        self._lmdb.close()


class Writing:
    """A transaction of the state file: after a crash either all of its changes are there, or none. Each method raises
    OSError and Unusable; an error ends the transaction."""

    def __init__(self, environment: Environment, writing: lmdb.Transaction[bytes], databases: Opened) -> None:
        self._environment, self._writing, self._databases = environment, writing, databases

    def put(self, name: str, entries: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Store `entries` in the database `name`; a value of None removes the entry. Only entries that differ from the
        stored ones are written. Return their bytes."""
        database, changed_bytes = self._databases[name], 0
        seals = self._environment.seals_of(name)
        try:
            for key, value in entries:
                place = seals.name(name, key)
                if value is None:
                    self._writing.delete(place, db=database)
                    continue
                former = self._writing.get(place, db=database)
                if former is None or seals.unsealed(name, key, former) != value:
                    self._writing.put(place, stored := seals.sealed(name, key, value), db=database)
                    changed_bytes += len(key) + len(stored)
        except lmdb.Error as error:
            raise self._failed(error) from None
        return changed_bytes

    def keep_only(self, name: str, keys: set[bytes]) -> None:
        """Remove every entry of the database `name` whose key is not in `keys`."""
        seals = self._environment.seals_of(name)
        keys = {seals.name(name, key) for key in keys}
        try:
            with self._writing.cursor(db=self._databases[name]) as cursor:
                more = cursor.first()
                while more:
                    more = cursor.next() if cursor.key() in keys else cursor.delete()
        except lmdb.Error as error:
            raise self._failed(error) from None

    def commit(self, *, durable: bool) -> None:
        """Commit the changes. `durable`: a loss of power does not undo them; otherwise it may undo the last commits,
        each as a whole."""
        try:
            self._writing.commit()
            if durable:
                self._environment.sync()
        except lmdb.Error as error:
            raise self._failed(error) from None

    def abort(self) -> None:
        with suppress(lmdb.Error):
            self._writing.abort()

    def _failed(self, error: lmdb.Error) -> OSError | Unusable:
        self.abort()
        if isinstance(error, lmdb.MapFullError):
            self._environment.grow()
        if isinstance(error, lmdb.CorruptedError | lmdb.PageNotFoundError | lmdb.PanicError | lmdb.PageFullError):
            return Unusable(f"damaged: {error}")
        return as_os_error(error, self._environment.path)


class OpenedEnvironment(NamedTuple):
    """The result of `open_environment`. `is_new`: the file is empty, since there was none or it was set aside.
    `was_aside` is the reason why it was set aside, or ""."""

    environment: Environment
    is_new: bool
    was_aside: str = ""


def open_environment(directory: Path, version: str, distrusted: str = "", keys: Keys = NO_KEYS) -> OpenedEnvironment:
    """Open the newest state file in `directory`, or make a new one, encrypted with the last of `keys`. `version` is the
    version of this program. `distrusted` is a reason to set the present file aside unread, or "". Raises OSError."""
    path = newest(directory)
    for leftover in directory.glob(f"{PREFIX}*{SUFFIX}{NEW}*"):
        with suppress(OSError):
            leftover.unlink()
    if path is None:
        return OpenedEnvironment(make(directory, 1, version, keys), True)
    _remove_older(directory, path)
    try:
        if distrusted:
            raise Unusable(distrusted)
        require_whole(path)
        return OpenedEnvironment(_opened(path, keys), False)
    except Unusable as why:
        with suppress(FileNotFoundError):
            path.with_name(path.name + LOCK).unlink()
        aside = directory / ASIDE
        with suppress(OSError):
            aside.unlink()  # a directory cannot take the place of a file
        path.replace(aside)
        try:
            return OpenedEnvironment(make(directory, number_of(path) + 1, version, keys), True, str(why))
        except OSError:  # on a full disk: it is named when there is room
            aside.replace(path)
            raise


def open_shared(directory: Path) -> Environment:
    """Open the newest state file in `directory` for reading, while a daemon may write to it. Raises Unusable and
    OSError."""
    path = newest(directory)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, "there is no small state yet", str(directory))
    for turn in range(CHECKS, 0, -1):
        try:
            require_whole(path)
            break
        except (Unusable, FileNotFoundError):  # it may have been written, or replaced, just now
            if turn == 1:
                raise
            time.sleep(0.2)
            path = newest(directory) or path
    return _opened(path, shared=True)


def reopened(environment: Environment) -> Environment:
    """Close `environment` and return it opened again, for writing if the medium can be written now."""
    environment.close()
    return _opened(environment.path, environment.keys)


def _opened(path: Path, keys: Keys = NO_KEYS, *, shared: bool = False) -> Environment:
    try:
        environment = Environment(path, shared=shared, keys=keys)
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        environment = Environment(path, readonly=True, keys=keys)
    about = dict(environment.read("about"))
    if about.get(FORMAT_KEY) != str(FORMAT).encode():
        environment.close()
        writer, written = (about.get(key) or b"?" for key in (WRITER_KEY, FORMAT_KEY))
        raise Unusable(f"written by {writer.decode(errors='replace')} in format {written.decode(errors='replace')}")
    if environment.seals is None and not shared:
        environment.close()
        raise Unusable("encrypted with a key that is not here")
    return environment


def make(directory: Path, number: int, version: str, keys: Keys = NO_KEYS) -> Environment:
    """Make an empty state file with this number, which gets its name when it is complete, and return it opened. Raises
    OSError."""
    final = path_of(directory, number)
    environment = _begin(final, version, keys)
    environment.close()
    return finish(final, keys)


def begin_rewrite(former: Environment, version: str, keys: Keys = NO_KEYS) -> Environment:
    """Return a new, empty environment, which replaces `former` once `finish_rewrite` is called. It is encrypted with
    the last of `keys`. Raises OSError."""
    return _begin(path_of(former.path.parent, number_of(former.path) + 1), version, keys)


def finish_rewrite(former: Environment, new: Environment) -> Environment:
    """Replace `former` with `new`, remove the file of `former` and `state.aside`, and return the opened environment.
    Raises OSError."""
    path = new.path.with_name(new.path.name.removesuffix(NEW))
    new.sync()
    new.close()
    opened = finish(path, new.keys)
    former.close()
    _remove_older(path.parent, path)
    with suppress(OSError):
        (path.parent / ASIDE).unlink()
    return opened


def _begin(final: Path, version: str, keys: Keys) -> Environment:
    temporary = final.with_name(final.name + NEW)
    for leftover in (temporary, temporary.with_name(temporary.name + LOCK)):
        with suppress(FileNotFoundError):
            leftover.unlink()
    environment = Environment(temporary, create=True, keys=keys)
    writing = environment.begin()
    writing.put("about", [(FORMAT_KEY, str(FORMAT).encode()), (WRITER_KEY, version.encode())])
    if keys:
        writing.put("about", [(KEY_KEY, list(keys)[-1].encode())])
    writing.commit(durable=True)
    environment.unlock()
    return environment


def finish(path: Path, keys: Keys = NO_KEYS) -> Environment:
    """Give the new, complete file the name `path`, and return it opened. Raises OSError."""
    temporary = path.with_name(path.name + NEW)
    with suppress(FileNotFoundError):
        temporary.with_name(temporary.name + LOCK).unlink()
    temporary.replace(path)
    # `sync_directory` would do it, but its module loads `tempfile`, 0.7 MB of this process.
    descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Environment(path, keys=keys)


def _remove_older(directory: Path, path: Path) -> None:
    for each in directory.glob(f"{PREFIX}*"):
        own = each.name.removesuffix(LOCK).removesuffix(NEW)
        if own != path.name and number_of(each.with_name(own)) >= 0:
            with suppress(OSError):
                each.unlink()
