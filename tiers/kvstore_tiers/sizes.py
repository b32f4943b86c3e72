"""Sizes of slots and of the containers that hold them. Pure arithmetic, one place for it."""

from __future__ import annotations

from kvstore_proto.arena import ALIGNMENT_BYTES


def require_slot_size(nbytes: int) -> None:
    """Raise ValueError unless `nbytes` is a size a slot can have."""
    if nbytes <= 0 or nbytes % ALIGNMENT_BYTES:
        raise ValueError(f"a slot is a positive multiple of {ALIGNMENT_BYTES} bytes, not {nbytes}")


def aligned_up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def aligned_down(nbytes: int) -> int:
    return nbytes // ALIGNMENT_BYTES * ALIGNMENT_BYTES
