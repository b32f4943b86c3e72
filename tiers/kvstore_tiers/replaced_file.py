"""Small files that are replaced as a whole: written beside, synced, renamed. The one place that writes them.

A crash leaves the old file or the new one. A write that fails leaves the old one and nothing beside it, and names the
file: also where the system call that failed knew a descriptor only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path

from kvstore_tiers import failpoints

_FILES = {
    "secret": "the secret of a state directory",
    "identity.json": "the check value of the secret and what tenants' names stand for",
    "names.json": "names of tenants and fingerprints",
    "usage.npz": "how blocks were used",
    "endurance.json": "the rest of the endurance budget",
    "scrub.json": "the scrubber's place",
    "format": "the version of an NVMe directory",
    "seal": "that no record waits to be synced",
}
for _name, _what in _FILES.items():
    failpoints.declare(f"file.{_name}", f"a file with {_what} is written beside the old one, which is in place")


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace `path`, mode 0600. `durable`: over a crash of the machine too. Raises OSError that names `path`."""
    with replaced_file(path, durable=durable) as file:
        file.write(content)


@contextmanager
def replaced_file(path: Path, *, durable: bool = True) -> Iterator[BufferedWriter]:
    """A file that takes the place of `path` once it is written; otherwise as `replace_file`."""
    temporary = path.with_name(f"{path.name}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(descriptor)
            failpoints.hit(f"file.{path.name}")
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        if durable:
            sync_directory(path.parent)
    except OSError as error:
        error.filename = str(path)
        raise


def sync_directory(path: Path) -> None:
    """Make names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def remove_leftover(path: Path) -> None:
    """Remove what a process that was killed left beside `path`, if that can be done."""
    temporary = path.with_name(f"{path.name}.new")
    if temporary.exists():  # on a read-only file system even the removal of what is not there fails
        with suppress(OSError):
            temporary.unlink()
