"""The daemon's own files that could not be written: their paths, the time, and the consequences.

The daemon goes on without them, and the part that owns the file tries again. The module owns the words: one log line
when a file cannot be written, one when it can again, a sentence for operators in between. It writes no file itself.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)
RETRY_S = 30.0  # until a file that could not be written is tried again


class Unsaved:
    """A record of the daemon's own files that could not be written, with the consequences of that. Any thread may call
    it."""

    def __init__(self) -> None:
        self._sentences: dict[Path, str] = {}

    def failed(self, path: Path, error: OSError, cost: str) -> None:
        """Note that `path` could not be written. `cost` is the consequence, as a phrase without a subject."""
        sentence = f"{path} cannot be written ({error.strerror or error}): {cost}"
        if path not in self._sentences:
            log.warning("%s", sentence)
        self._sentences[path] = sentence

    def saved(self, path: Path) -> None:
        """Note that `path` has been written, or need not be."""
        if self._sentences.pop(path, None) is not None:
            log.info("%s can be written again", path)

    def concerns(self, path: Path) -> bool:
        """Return whether `path` could not be written."""
        return path in self._sentences

    def sentences(self) -> list[str]:
        """Return one sentence for each file that could not be written."""
        return list(self._sentences.values())
