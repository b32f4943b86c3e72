"""The blocks that a tier kept over a restart, as columns: a million blocks in a few arrays instead of a million
objects.

Keys are two little-endian words each, the bytes of the key as on the medium. Invariant: all columns have one entry a
block; no key occurs twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.image import Slot
from kvstore_tiers.key_table import KeyTable

Column = npt.NDArray[Any]
KEY_WORDS = 2


class BlockOrigin(NamedTuple):
    """The facts that many blocks have in common: the digest of their tenant (16 bytes), the fingerprint of the model
    and settings on which their bytes depend (32 bytes), and the number of their layer group.
    """

    tenant: bytes
    fingerprint: bytes
    group: int


@dataclass(slots=True)
class RecoveredBlocks:
    """The blocks that a tier kept over a restart, as arrays with an entry for each block. `key` and `parent` are uint64
    of the shape (blocks, 2), the two halves of a key. `origin` is an index into the list `origins`. `container`,
    `offset`, `nbytes` and `generation` are the slot. `kept` is a packed retention term
    (`kvstore_proto.terms.kept_word`), or None if no block has one. `table` finds blocks by `key`, if it was made."""

    origins: list[BlockOrigin]
    key: Column
    parent: Column
    origin: Column
    depth: Column
    payload_bytes: Column
    container: Column
    offset: Column
    nbytes: Column
    generation: Column
    codec: Column | None = None  # None where no block has one
    stored_bytes: Column | None = None
    kept: Column | None = None
    error: Column | None = None  # None where no block is lossy
    table: KeyTable | None = None

    def __len__(self) -> int:
        return len(self.key)

    def key_of(self, block: int) -> bytes:
        return bytes(self.key[block].tobytes())

    def parent_of(self, block: int) -> bytes:
        return bytes(self.parent[block].tobytes())

    def slot_of(self, block: int) -> Slot:
        return Slot(
            int(self.container[block]), int(self.offset[block]), int(self.nbytes[block]), int(self.generation[block])
        )

    def take(self, chosen: Column) -> RecoveredBlocks:
        """Return only the blocks that `chosen` selects: an array of indices, or a boolean mask over all blocks."""
        columns = {name: getattr(self, name)[chosen] for name in _COLUMNS}
        for name in ("codec", "stored_bytes", "kept", "error"):
            column = getattr(self, name)
            columns[name] = None if column is None else column[chosen]
        return RecoveredBlocks(self.origins, **columns)

    def form_of(self, block: int) -> tuple[int, int, float]:
        """Return the number of the codec of a block's stored bytes and their length, 0 and 0 where it has none; and the
        error bound, 0 where the payload is what was put."""
        error = 0.0 if self.error is None else float(self.error[block])
        if self.codec is None or self.stored_bytes is None:
            return 0, 0, error
        return int(self.codec[block]), int(self.stored_bytes[block]), error


_COLUMNS = (
    "key", "parent", "origin", "depth", "payload_bytes", "container", "offset", "nbytes", "generation",
)  # fmt: skip


def as_columns(blocks: Iterable[tuple[Slot, BlockHeader]]) -> RecoveredBlocks:
    """Return `blocks`, pairs of a slot and a header, as arrays with an entry for each block."""
    listed = list(blocks)
    origins: dict[BlockOrigin, int] = {}
    origin = [origins.setdefault(BlockOrigin(h.tenant, h.fingerprint, h.group), len(origins)) for _, h in listed]

    is_coded = any(header.codec for _, header in listed)

    def column(values: Iterable[int], kind: type[np.unsignedinteger[Any]]) -> Column:
        return np.fromiter(values, dtype=kind, count=len(listed))

    return RecoveredBlocks(
        list(origins),
        key=as_words(b"".join(header.key for _, header in listed)),
        parent=as_words(b"".join(header.parent for _, header in listed)),
        origin=column(origin, np.uint32),
        depth=column((header.depth for _, header in listed), np.uint32),
        payload_bytes=column((header.payload_bytes for _, header in listed), np.uint64),
        container=column((slot.container for slot, _ in listed), np.uint32),
        offset=column((slot.offset for slot, _ in listed), np.uint64),
        nbytes=column((slot.nbytes for slot, _ in listed), np.uint64),
        generation=column((slot.generation for slot, _ in listed), np.uint64),
        kept=column((header.kept for _, header in listed), np.uint64) if any(h.kept for _, h in listed) else None,
        error=np.array([h.error for _, h in listed], np.float32) if any(h.error for _, h in listed) else None,
        codec=column((header.codec for _, header in listed), np.uint8) if is_coded else None,
        stored_bytes=column((header.stored_bytes for _, header in listed), np.uint64) if is_coded else None,
    )


def as_words(packed_keys: bytes) -> Column:
    """Return the 16-byte keys that `packed_keys` contains, one after another, as an array uint64 of the shape (keys,
    2).
    """
    return np.frombuffer(packed_keys, dtype="<u8").reshape(-1, KEY_WORDS)
