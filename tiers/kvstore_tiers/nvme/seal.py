"""The seal of a directory: its last user closed it in order, and no record waits to be synced.

Owns DIR/seal. It saves the next start the sync of all slabs. A file that says anything else is no seal.
Invariants: it is written only when the last commit held; it is gone from the medium before a record changes.
"""

from __future__ import annotations

from pathlib import Path

from kvstore_proto.replaced_file import sync_directory
from kvstore_tiers.replaced_file import replace_file

SEAL = "seal"
_TEXT = b"no record waits to be synced\n"


class Seal:
    """The seal of the tier's directory at `path`. `held`: there was one that holds when this was made."""

    def __init__(self, path: Path) -> None:
        self._path = path / SEAL
        self.held = self._holds()

    def remove(self) -> None:
        """From here on records may change. Raises OSError."""
        if self._path.exists():
            self._path.unlink()
        sync_directory(self._path.parent)  # also for a process that was killed before it came to that

    def write(self) -> None:
        """Everything that changed is committed. Raises OSError."""
        replace_file(self._path, _TEXT, durable=False)

    def _holds(self) -> bool:
        try:
            return self._path.read_bytes() == _TEXT
        except OSError:
            return False
