"""What writing blocks puts on the medium, counted from above: slots, records, and what a commit adds.

A slot is the header page and the payload, rounded to pages. A record has 256 bytes but is written through a page of
4096, once to publish the block and once to withdraw it when its slot is freed. A group commit adds the file system's
journal; with 33 KiB, measured on ext4 when an index was written too, it is not counted too low.
What the drive itself writes more (garbage collection) is in the maker's figures already.
"""

from __future__ import annotations

from kvstore_proto.arena import ALIGNMENT_BYTES

RECORD_PAGES = 2
COMMIT_PAGES = 8
OVERHEAD_BYTES = RECORD_PAGES * ALIGNMENT_BYTES
COMMIT_BYTES = COMMIT_PAGES * ALIGNMENT_BYTES


def medium_bytes(slot_bytes: int) -> int:
    """Bytes that a block in a slot of this size costs the medium in its whole life there, less its commit."""
    return slot_bytes + OVERHEAD_BYTES
