"""Judging records in bulk, by compiled code and by NumPy, against judging them one by one, as docs/format.md has it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_cuda.host_copies import native
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
from kvstore_tiers.nvme.record_checksums import BATCH_RECORDS, RECORD_WORDS, RecordChecksums
from kvstore_tiers.nvme.verdicts import Judge, LiveBlocks, Origins, Verdicts

SLOTS = 40
SUPERBLOCK = Superblock(b"u" * 16, (1 << 64) - 5, 7, 8192, SLOTS, 3, 1 << 20, 42)
KINDS = ("live", "live", "live", "free", "quarantined", "zero", "flipped", "misplaced", "no magic", "one byte")


@pytest.fixture(scope="module", params=["compiled", "NumPy"])
def code(request: pytest.FixtureRequest) -> Iterator[None]:
    found = native.wait()
    if request.param == "compiled" and found is None:
        pytest.skip("no compiled code on this machine")
    native.library = found if request.param == "compiled" else None
    yield
    native.library = found


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


@pytest.mark.usefixtures("code")
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


def judged(records: np.ndarray, within: int, origins: Origins) -> Verdicts:
    first = 3
    superblock = Superblock(b"u" * 16, (1 << 64) - 5, 7, 8192, first + len(records), 3, 1 << 40, 42)
    room = LiveBlocks.room(len(records))
    for name in (column.name for column in fields(room)):
        getattr(room, name).fill(7)
    length_bytes = superblock.slots_offset + (first + within) * superblock.slot_bytes
    pieces = Judge(superblock, length_bytes, RecordChecksums(), origins).judge(first, records, room)
    return Verdicts.joined(pieces, room)


@pytest.mark.parametrize("origins", [1, 7, 300])
@pytest.mark.parametrize("bad", [0.0, 0.01, 0.6])
def test_compiled_code_and_numpy_judge_to_the_byte_alike(
    origins: int, bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any word may hold anything; a few origins are known before, by other numbers."""
    library = native.wait()
    if library is None:
        pytest.skip("no compiled code on this machine")
    random, count = np.random.default_rng(origins), BATCH_RECORDS + 321
    raw = random.integers(0, 1 << 64, (count, RECORD_WORDS), dtype=np.uint64)
    some = random.integers(0, 1 << 64, (origins, 8), dtype=np.uint64)[random.integers(0, origins, count)]
    raw[:, 9:15], raw[:, 23] = some[:, :6], some[:, 6]
    raw[:, 15] = raw[:, 15] >> np.uint64(16) << np.uint64(16) | some[:, 7] & np.uint64(0xFFFF)
    raw[:, 0] = raw[:, 0] & np.uint64(0xFF00FFFF00000000) | np.uint64(int.from_bytes(b"KVR1", "little"))
    raw[:, 0] |= random.choice(np.array([0, 1, 1, 1, 2, 3], np.uint64), count) << np.uint64(48)
    raw[random.random(count) < bad / 2] = 0
    seeds = np.uint64((1 << 64) - 2) + np.arange(count, dtype=np.uint64)
    for begin in range(0, count, BATCH_RECORDS):
        part = slice(begin, begin + BATCH_RECORDS)
        raw[part, -1] = RecordChecksums().load(raw[part], seeds[part])[1]
    flipped = np.flatnonzero(random.random(count) < bad)
    raw[flipped, random.integers(0, RECORD_WORDS, len(flipped))] ^= np.uint64(1) << np.uint64(random.integers(0, 64))
    found = []
    for each in (library, None):
        monkeypatch.setattr(native, "library", each)
        known = Origins()
        for at in (5, 2):
            known.number_of(raw[at, 9:15].tobytes() + raw[at, 15].tobytes()[:2] + raw[at, 23].tobytes())
        found.append((judged(raw, count - 100, known), known.raw()))
    (ours, ours_named), (theirs, theirs_named) = found
    assert ours_named == theirs_named and len(ours_named) >= origins // 2
    assert (ours.last_sequence, ours.damaged, ours.truncated) == (
        theirs.last_sequence,
        theirs.damaged,
        theirs.truncated,
    )
    assert ours.withdrawn == theirs.withdrawn and len(ours.live) > 0
    for name in ("states", "seen_generations", "stored"):
        assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes(), name
    for column in fields(LiveBlocks):
        assert getattr(ours.live, column.name).tobytes() == getattr(theirs.live, column.name).tobytes(), column.name
