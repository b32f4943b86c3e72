"""Judging records in bulk against judging them one by one, as docs/format.md has it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    RecordState,
    Superblock,
    nothing_at,
    pack_record,
    record_header,
    record_holds,
)
from kvstore_tiers.nvme.record_checksums import RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.verdicts import Judge, LiveBlocks, Origins

SLOTS = 40
SUPERBLOCK = Superblock(b"u" * 16, (1 << 64) - 5, 7, 8192, SLOTS, 3, 1 << 20, 42)
KINDS = ("live", "live", "live", "free", "quarantined", "zero", "flipped", "misplaced", "no magic", "one byte")


def record(kind: str, index: int, origin: int) -> bytes:
    header = BlockHeader(
        index.to_bytes(16, "big"), b"p" * 16, bytes([origin]) * 32, bytes([origin % 2]) * 16, 4096,
        group=origin % 3, depth=index, generation=index + 5, checksum=9,
    )  # fmt: skip
    seed = SUPERBLOCK.record_seed(index)
    if kind == "zero":
        return bytes(RECORD_BYTES)
    if kind == "one byte":
        return bytes(RECORD_BYTES - 20) + b"\x01" + bytes(19)
    if kind == "free":
        return pack_record(nothing_at(index + 6), RecordState.FREE, index, seed)
    state = RecordState.QUARANTINED if kind == "quarantined" else RecordState.LIVE
    raw = bytearray(pack_record(header, state, index, seed + 1 if kind == "misplaced" else seed))
    if kind == "flipped":
        raw[30] ^= 4
    if kind == "no magic":
        raw[:4] = b"KVR2"
    return bytes(raw)


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 5)), min_size=1, max_size=SLOTS),
    st.integers(0, SLOTS),
    st.integers(0, SLOTS),
)
def test_in_bulk_as_one_by_one(kinds: list[tuple[str, int]], first: int, within: int) -> None:
    first = min(first, SLOTS - len(kinds))
    raw = [record(kind, first + number, origin) for number, (kind, origin) in enumerate(kinds)]
    length_bytes = SUPERBLOCK.slots_offset + within * SUPERBLOCK.slot_bytes
    records = np.frombuffer(b"".join(raw), "<u8").reshape(-1, RECORD_WORDS)
    origins = Origins()
    room = LiveBlocks.room(SLOTS)
    [judged] = Judge(SUPERBLOCK, length_bytes, RecordChecksums(), origins).judge(first, records, room)

    states, withdrawn, live = [], set(), []
    for index, one in enumerate(raw, first):
        state = RecordState(one[6]) if record_holds(one, SUPERBLOCK.record_seed(index)) else RecordState.FREE
        if any(one) and not record_holds(one, SUPERBLOCK.record_seed(index)):
            withdrawn.add(index)
        elif state is RecordState.LIVE and index >= within:
            state = RecordState.FREE
            withdrawn.add(index)
        elif state is RecordState.LIVE:
            live.append((index, record_header(one)))
        states.append(state)
    assert judged.states.tolist() == states
    assert judged.withdrawn == withdrawn
    assert judged.damaged + judged.truncated == len(withdrawn)
    assert judged.live.slots.tolist() == [index for index, _ in live]
    named = origins.named()
    for position, (_, header) in enumerate(live):
        found, origin = judged.live, named[judged.live.origin[position]]
        assert (found.key[position].tobytes(), found.parent[position].tobytes()) == (header.key, header.parent)
        assert (origin.tenant, origin.fingerprint, origin.group) == (header.tenant, header.fingerprint, header.group)
        assert (found.depth[position], found.payload_bytes[position]) == (header.depth, header.payload_bytes)
        assert found.generation[position] == header.generation
