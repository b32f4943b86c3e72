"""What writing blocks puts on the medium, counted from above: slots, records, the index, and what a commit adds.

A slot is the header page and the payload, rounded to pages. A record has 256 bytes but is written through a page of
4096, once to publish the block and once to withdraw it when its slot is freed. The index copies the page of a key and
its share of those above it. A group commit adds the root, meta and free pages of the index and the file system's
journal: measured on ext4, 33 KiB for a block that is committed alone, 4 KiB a block where many share a commit.
What the drive itself writes more (garbage collection) is in the maker's figures already.
"""

from __future__ import annotations

from kvstore_proto.arena import ALIGNMENT_BYTES

RECORD_PAGES = 2
INDEX_PAGES = 2
COMMIT_PAGES = 8
OVERHEAD_BYTES = (RECORD_PAGES + INDEX_PAGES) * ALIGNMENT_BYTES
COMMIT_BYTES = COMMIT_PAGES * ALIGNMENT_BYTES


def medium_bytes(slot_bytes: int) -> int:
    """Bytes that a block in a slot of this size costs the medium in its whole life there, less its commit."""
    return slot_bytes + OVERHEAD_BYTES
