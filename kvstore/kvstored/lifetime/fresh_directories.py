"""Directories that a start makes, so that a start which fails leaves none behind."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path


class FreshDirectories:
    """Looks, when it is made, which of `paths` are missing, with the directories above them."""

    def __init__(self, *paths: Path) -> None:
        self._missing = [path for path in paths if not path.exists()]
        self._above = {above for path in self._missing for above in path.parents if not above.exists()}

    def remove(self) -> None:
        """Take away what was missing then, and all that is in it. The directories above go if they are empty."""
        for path in self._missing:
            shutil.rmtree(path, ignore_errors=True)
        for above in sorted(self._above, key=lambda path: -len(path.parts)):
            with contextlib.suppress(OSError):
                above.rmdir()
