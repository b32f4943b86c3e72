"""A mapped object: its tensors as read-only arrays where they lie, shared by all processes that map it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_client.errors import invalid
from kvstore_client.memory import Bytes
from kvstore_client.objects.mapping import ObjectMapping
from kvstore_proto.manifest import NUMPY_DTYPES, Manifest, TensorEntry
from kvstore_proto.v1 import kvstore_pb2 as wire


class MappedObject(Mapping[str, npt.NDArray[Any]]):
    """A version of an object in this process's memory: a mapping from the names of its tensors to read-only arrays. A
    type that NumPy lacks, such as BF16, comes as unsigned integers of its width; `entry` says which. The arrays stay
    valid after `close` and after the end of the store, as long as they are in use. `content` has all bytes.
    """

    def __init__(self, version: wire.ObjectVersion, manifest: Manifest, mapping: ObjectMapping, content: Bytes) -> None:
        self.version, self.manifest = version, manifest
        self._mapping, self._content, self._entries = mapping, content, manifest.by_name

    @property
    def content(self) -> Bytes:
        """All bytes of the object, as one read-only array uint8[bytes]."""
        return self._content

    @property
    def digest(self) -> str:
        """The digest of the manifest, and so of the content, as hex: what a fingerprint takes for the weights' own."""
        return self.version.digest.hex()

    @property
    def valid(self) -> bool:
        """True if the daemon holds the parts for this process, as it does while the connection and its renewals
        last."""
        return self._mapping.usable_s > 0

    @property
    def address(self) -> int:
        return self._mapping.address

    def entry(self, name: str) -> TensorEntry:
        """Return type, shape and place of the tensor `name`. Raises KeyError."""
        return self._entries[name]

    def raw(self, name: str) -> Bytes:
        """Return the bytes of the tensor `name`. Raises KeyError."""
        each = self._entries[name]
        return self._content[each.offset : each.offset + each.nbytes]

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        each = self._entries[name]
        code = NUMPY_DTYPES.get(each.dtype)
        if code is None:
            raise invalid(f"{name} has the type {each.dtype}, of which there are no arrays: use raw()")
        return self.raw(name).view(code).reshape(each.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def populate(self) -> None:
        """Enter all pages into this process's page table now, so that no first read has to."""
        self._mapping.populate()

    def close(self) -> None:
        """Give up this object's own array; the mapping ends with the last array that others have over it."""
        self._content = np.empty(0, np.uint8)

    def __enter__(self) -> MappedObject:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
