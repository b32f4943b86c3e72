"""Slot images in files, named for a tier that reads them by itself. Owns the record and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore_proto.arena import HEADER_BYTES
from kvstore_tiers.sizes import aligned_up


@dataclass(frozen=True, slots=True)
class FileImage:
    """From `offset` on: a header page with this `generation`, then `payload_bytes` of payload and zeros up to the end
    of the page. `descriptor` can read the file and not write it, past the page cache where the file system has that."""

    descriptor: int
    offset: int
    payload_bytes: int
    generation: int

    @property
    def nbytes(self) -> int:
        return HEADER_BYTES + aligned_up(self.payload_bytes)
