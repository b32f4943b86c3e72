"""Errors of a tier directory that cannot be opened: each message says what to do."""

from __future__ import annotations


class DirectoryError(Exception):
    """The NVMe tier cannot be opened here. The message says what was wrong and what to do."""


class DirectoryInUse(DirectoryError):
    """Another process holds the directory's lock."""

    def __init__(self, directory: str, holder_pid: int) -> None:
        holder = f"process {holder_pid}" if holder_pid else "another process"
        super().__init__(
            f"{directory} is in use by {holder}: stop that kvstored, or give this one a directory of its own"
        )
        self.holder_pid = holder_pid


class DirectoryUnusable(DirectoryError):
    """Not a directory, not writable, no room, or without a feature that the configuration requires."""


class FormatUnsupported(DirectoryError):
    """The directory, a slab or the index was written by a newer version."""

    def __init__(self, what: str, found: object, supported: int) -> None:
        super().__init__(
            f"{what} has format {found}, this kvstored reads format {supported}: run the newer version that wrote it, "
            "or start with an empty directory (its blocks will be computed again)"
        )
