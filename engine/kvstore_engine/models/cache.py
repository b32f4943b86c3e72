"""The folder that holds fetched and converted models, and the rules for its files.

The module owns the location, the lock between processes, and the rule that a file appears whole or not at all: it is
written under a temporary name in that folder, synced, and renamed. It never deletes a finished file.
"""

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from kvstore_engine.errors import OperationError
from kvstore_proto.replaced_file import replaced_file


def cache_root() -> Path:
    """Return the folder for cached files, `$XDG_CACHE_HOME/kvstored` or `~/.cache/kvstored`. It need not exist yet."""
    home = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is invalid and must be ignored.
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "kvstored"


def models_directory() -> Path:
    """Return the folder in which fetched models are kept, which is made if needed. Raises OperationError if that
    fails.
    """
    directory = cache_root() / "models"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperationError(
            f"cannot create the model cache {directory}: {error.strerror}; set XDG_CACHE_HOME to a writable folder"
        ) from None
    return directory


@contextlib.contextmanager
def exclusive(target: Path) -> Iterator[None]:
    """Hold a lock on making the file `target` while the `with` block runs. A second process that wants to make the same
    file waits, and then finds it made. The lock file stays.
    """
    lock = target.with_name(f".{target.name}.lock")
    with open(lock, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process to finish {target.name}", file=sys.stderr)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[BinaryIO]:
    """Give the `with` block a file to write, which becomes `target` if the block ends without an error and is deleted
    otherwise. Raises OperationError if it cannot be written.
    """
    try:
        with replaced_file(target, mode=0o644, is_shared=True) as file:
            yield file
    except OSError as error:
        raise OperationError(f"cannot write {target}: {error.strerror or error}") from None
