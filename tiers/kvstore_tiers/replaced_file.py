"""The storage tower's small files, which are replaced as a whole, with a failpoint before each is renamed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from io import BufferedWriter
from pathlib import Path

from kvstore_proto import replaced_file as whole
from kvstore_tiers import failpoints

_FILES = {
    "secret": "the secret of a state directory",
    "identity.json": "the check value of the secret and what tenants' names stand for",
    "listing.json": "the users of each tenant by the listing in force",
    "keys": "the keys of what is encrypted at rest",
    "format": "the version of an NVMe directory",
    "seal": "that no record waits to be synced",
}
for _name, _what in _FILES.items():
    failpoints.declare(f"file.{_name}", f"a file with {_what} is written beside the old one, which is in place")


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replace the file `path` by one with `content` and mode 0600, so that a crash leaves the old file or the new one.
    With `durable` the new file also survives a power loss. Raises OSError that names `path`.
    """
    with replaced_file(path, durable=durable) as file:
        file.write(content)


def replaced_file(path: Path, *, durable: bool = True) -> AbstractContextManager[BufferedWriter]:
    """Give the `with` block a file to write. At the block's end that file takes the place of `path`, as `replace_file`
    describes.
    """
    return whole.replaced_file(path, durable=durable, before_rename=lambda: failpoints.hit(f"file.{path.name}"))
