"""Files of the daemon's own that could not be written: which, since when, and what that costs.

The daemon goes on without them, and the part that owns such a file tries again. Owns the words: one log line when a
file cannot be written, one when it can again, a sentence for operators in between. Never writes anything.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)
RETRY_S = 30.0  # until a file that could not be written is tried again


class Unsaved:
    """Remembers the files of one daemon. Its calls may come from any thread."""

    def __init__(self) -> None:
        self._sentences: dict[Path, str] = {}

    def failed(self, path: Path, error: OSError, cost: str) -> None:
        """Note that `path` could not be written. `cost`: what follows from that, without a subject of its own."""
        sentence = f"{path} cannot be written ({error.strerror or error}): {cost}"
        if path not in self._sentences:
            log.warning("%s", sentence)
        self._sentences[path] = sentence

    def saved(self, path: Path) -> None:
        """Note that `path` was written, or need not be."""
        if self._sentences.pop(path, None) is not None:
            log.info("%s can be written again", path)

    def sentences(self) -> list[str]:
        """Return one for each file that is behind."""
        return list(self._sentences.values())
