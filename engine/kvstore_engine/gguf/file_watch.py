"""Notices that a model's file was changed while it is in use.

The module owns the digest of everything that the engine reads of the file, and the identity that the file had when it
was last known to hold just that. While the identity stays, the bytes do. If its size or time of writing changed, it was
written to. If only the time of change moved, the file is read again: a rename, a link or a changed owner leave the
digest unchanged.
"""

from __future__ import annotations

import threading
from pathlib import Path

from kvstore_engine.gguf.open_file import FileChanged
from kvstore_engine.gguf.reader import FileDigest, GGUFFile

_ATTEMPTS = 5  # to read a file that is touched while it is read


class FileWatch:
    """A watch over the model's `file` that notices changes of it while it is in use. `expected` is the digest that its
    content must have, if another process computed one. After a change every call raises FileChanged.
    """

    def __init__(self, file: GGUFFile, expected: FileDigest | None = None) -> None:
        self.file = file
        self._known = file.source.identity
        known = file.source.known_digest
        self._digest = expected or (FileDigest(*known) if known is not None else None)
        self._lock = threading.Lock()
        self._is_final, self._is_touched = False, False

    def digest(self) -> FileDigest:
        """Return the digest of the file's content. The first call reads the whole file. Raises FileChanged if the file
        was changed.
        """
        with self._lock:
            if self._digest is not None and self._is_as_known():
                return self._digest
            for _ in range(_ATTEMPTS):
                try:
                    before = self.file.source.settled_identity()
                    if self._is_final or not before.may_hold_the_same(self._known):
                        raise self._changed()
                    if self._digest is None and before != self._known:
                        raise self._changed()
                    found = self.file.digest()
                except FileChanged:
                    raise self._changed() from None
                if self._digest not in (None, found):
                    raise self._changed()
                if self.file.source.current_identity() == before:
                    self._is_touched |= before != self._known
                    self._known, self._digest = before, found
                    return found
            raise self._changed()

    def check(self) -> bool:
        """Return True if the file was not touched (written, or its times changed) since the last call. Return False if
        it was touched but has the same content as before, so that results from reads in between may be wrong. Raises
        FileChanged if its content differs.
        """
        if self._is_final:
            raise self._changed()
        if self._is_as_known() and not self._is_touched:
            return True
        self.digest()
        self._is_touched = False
        return False

    def require_untouched(self) -> None:
        """Raise FileChanged if the file was touched (written, or its times changed) since the last `check`."""
        if not self.check():
            raise self._changed()

    def _is_as_known(self) -> bool:
        return self.file.source.current_identity() == self._known

    def _changed(self) -> FileChanged:
        self._is_final = True
        return changed(self.file.path)


def changed(path: Path) -> FileChanged:
    """Return a FileChanged error for the model file `path`, whose content has changed while it was in use."""
    return FileChanged(f"the model file {path} was changed while it was in use: start again to use what it holds now")
