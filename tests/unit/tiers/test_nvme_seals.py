"""Encrypted blocks on NVMe: what is changed, exchanged or replayed is never served; without its key a block is no
damage; it moves and comes back as any other.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("cryptography", reason="needs the extra encryption")

from kvstore_proto.arena import HEADER_BYTES, SEALED, TOKENS_OFFSET, BlockHeader, Coded, read_header, slot_bytes
from kvstore_tiers import failpoints
from kvstore_tiers.base import ERRORS_IN_A_ROW, Coding, Outcome, OutcomeKind, Slot, TierState
from kvstore_tiers.nvme import DirectoryUnusable, NvmeTier
from kvstore_tiers.nvme.check import check_directory
from kvstore_tiers.nvme.data_keys import NoDataKeys
from kvstore_tiers.nvme.seals import DataKey
from kvstore_tiers.segments import AlignedBuffer, buffer_at, checksum_at, put_bytes
from kvstore_tiers.testing import block, finish
from kvstore_tiers.testing.transfers import get, put, segment_of
from kvstored.clients.tenants.data_keys import DataKeyFile

PAYLOAD_BYTES = 20_000
GOLDEN = Path(__file__).parents[2] / "golden" / "sealed-slot.bin"
CAPACITY_BYTES = 8 << 20


def name(number: int) -> bytes:
    return hashlib.blake2b(bytes([number]), digest_size=16).digest()


class Node:
    """An NVMe tier in a directory of its own, with keys for all tenants but `plain`."""

    def __init__(self, directory: Path, plain: bytes = b"") -> None:
        self.directory, self.path = directory, directory / "nvme"
        self.plain = plain
        self.tier = self.open()

    def open(self) -> NvmeTier:
        self.keys = DataKeyFile(self.directory, bytes(32), lambda digest: digest != self.plain)
        return NvmeTier.open(
            self.path, CAPACITY_BYTES, slab_bytes=1 << 20, keys=self.keys, coding=Coding(staging_bytes=1 << 20)
        )

    def reopen(self) -> dict[bytes, Slot]:
        self.tier.close()
        self.tier = self.open()
        return {header.key: slot for slot, header in self.tier.recover()}

    def put(self, number: int, tenant: bytes = b"a" * 16) -> tuple[Slot, BlockHeader, np.ndarray]:
        header, payload = block(number, PAYLOAD_BYTES)
        names = {"key": name(number), "parent": name(number - 1), "tenant": tenant}
        header = BlockHeader(**{**header.__dict__, **names})
        slot = put(self.tier, header, payload)
        assert slot is not None
        return slot, header, payload

    def image(self, slot: Slot) -> bytes:
        self.sync()
        with open(self.tier.location(slot).rpartition(":")[0], "rb") as file:
            return os.pread(file.fileno(), slot.nbytes, slot.offset)

    def write(self, slot: Slot, image: bytes) -> None:
        with open(self.tier.location(slot).rpartition(":")[0], "r+b") as file:
            os.pwrite(file.fileno(), image, slot.offset)
            os.fsync(file.fileno())

    def sync(self) -> None:
        assert finish(self.tier.sync).ok

    def read(self, slot: Slot, key: bytes) -> tuple[OutcomeKind, str]:
        outcome, _ = get(self.tier, slot, key, PAYLOAD_BYTES)
        return outcome.kind, outcome.message


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    made.tier.close()


def must_be_whole(node: Node, slot: Slot, header: BlockHeader, payload: np.ndarray) -> None:
    outcome, copy = get(node.tier, slot, header.key, PAYLOAD_BYTES)
    assert outcome.ok and np.array_equal(copy, payload), outcome
    assert outcome.header is not None
    same = ("key", "parent", "extra", "tenant", "tokens", "depth", "coded")
    assert all(getattr(outcome.header, name) == getattr(header, name) for name in same)
    assert outcome.header.checksum and not outcome.header.seal


@pytest.mark.parametrize(
    "at", [40, 60, 104, 140, 180, 190, 200, 220, 240, TOKENS_OFFSET + 3, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1]
)
def test_a_changed_bit_is_never_served(node: Node, at: int) -> None:
    slot, header, _ = node.put(1)
    image = bytearray(node.image(slot))
    image[at] ^= 4
    reseal(image)
    node.write(slot, bytes(image))
    kind, message = node.read(slot, header.key)
    assert kind in (OutcomeKind.CORRUPT, OutcomeKind.UNREADABLE), message


def reseal(image: bytearray) -> None:
    """Make the checksums right again, as one could who writes to the medium."""
    header = read_header(bytes(image[:152]) + bytes(8) + bytes(image[160:HEADER_BYTES]))
    assert isinstance(header, str)
    stored = AlignedBuffer(PAYLOAD_BYTES)
    put_bytes(stored.address, bytes(image[HEADER_BYTES : HEADER_BYTES + PAYLOAD_BYTES]))
    image[168:176] = checksum_at(stored.address, PAYLOAD_BYTES).to_bytes(8, "little")
    image[152:160] = bytes(8)
    page = AlignedBuffer(HEADER_BYTES)
    put_bytes(page.address, bytes(image[:HEADER_BYTES]))
    image[152:160] = checksum_at(page.address, HEADER_BYTES).to_bytes(8, "little")


def test_a_key_that_cannot_be_saved_is_no_failure_of_the_medium(node: Node) -> None:
    """The keys may be on another file system than the blocks: EBUSY says that the medium is not to be judged."""
    header, payload = block(2, PAYLOAD_BYTES)
    slot = node.tier.allocate(slot_bytes(PAYLOAD_BYTES))
    assert slot is not None

    def write() -> Outcome:
        return finish(lambda done: node.tier.write(slot, header, [segment_of(payload)], done))

    failpoints.arm("file.keys=error:ENOSPC;keys.written=error:EROFS@1")
    try:
        outcomes = [write() for _ in range(2 * ERRORS_IN_A_ROW)]
    finally:
        failpoints.disarm()
    assert {(each.kind, each.errno) for each in outcomes} == {(OutcomeKind.FAILED, errno.EBUSY)}
    assert "key cannot be saved" in outcomes[0].message
    assert node.tier.statistics().state is TierState.OK and write().ok


def test_an_image_of_another_tenant_slot_or_time_is_refused(node: Node) -> None:
    mine, header, payload = node.put(1, b"a" * 16)
    other, _, _ = node.put(1, b"b" * 16)
    images = node.image(mine), node.image(other)
    node.write(mine, images[1])
    assert node.read(mine, header.key)[0] is OutcomeKind.CORRUPT
    node.write(mine, images[0])
    must_be_whole(node, mine, header, payload)
    for slot in (mine, other):
        node.tier.free(slot)
    node.sync()
    again, header, payload = node.put(1, b"a" * 16)
    while again.offset != mine.offset:
        again, header, payload = node.put(1, b"a" * 16)
    assert again.generation > mine.generation
    now = node.image(again)
    node.write(again, images[0])  # an older image of the same block in the same slot
    kind, message = node.read(again, header.key)
    assert kind is OutcomeKind.CORRUPT and "generation" in message
    forged = bytearray(images[0])
    forged[120:128] = again.generation.to_bytes(8, "little")
    reseal(forged)
    node.write(again, bytes(forged))
    assert node.read(again, header.key) == (OutcomeKind.CORRUPT, SEAL_BROKEN)
    node.write(again, now)
    must_be_whole(node, again, header, payload)


SEAL_BROKEN = "its seal is broken: it was changed, or is another block's or tenant's"


def test_nothing_of_a_block_is_in_the_slab_and_equal_blocks_differ(node: Node) -> None:
    slots = [node.put(7)[0] for _ in range(2)]
    _, header, payload = node.put(7)
    images = [node.image(slot) for slot in slots]
    slab = b"".join(path.read_bytes() for path in node.path.rglob("*.slab"))
    raw = payload.tobytes()
    secret = [header.key, header.parent, header.tokens, *(raw[at : at + 16] for at in range(0, len(raw) - 16, 500))]
    assert len(header.tokens) >= 8 and not [each for each in secret if each in slab]
    assert images[0][HEADER_BYTES : HEADER_BYTES + 64] != images[1][HEADER_BYTES : HEADER_BYTES + 64]
    assert len({image[184:252] for image in images}) == 2


def test_blocks_of_both_kinds_come_back_after_a_restart(tmp_path: Path) -> None:
    node = Node(tmp_path, plain=b"p" * 16)
    made = [node.put(number, tenant) for number, tenant in enumerate([b"a" * 16, b"p" * 16, b"c" * 16], 1)]
    node.sync()
    found = node.reopen()
    assert set(found) == {header.key for _, header, _ in made}
    for _, header, payload in made:
        must_be_whole(node, found[header.key], header, payload)
    columns = node.tier.recover_columns()
    assert {columns.key_of(at) for at in range(3)} == set(found)
    assert {columns.parent_of(at) for at in range(3)} == {header.parent for _, header, _ in made}
    assert all(columns.form_of(at) == (0, 0, 0.0) for at in range(3))
    plain = node.image(found[made[1][1].key])
    assert read_header(plain[:HEADER_BYTES]).codec == 0 and made[1][2].tobytes() in plain  # type: ignore[union-attr]
    node.tier.close()


def test_a_block_is_copied_named_again_and_quarantined_without_its_bytes_in_clear(node: Node) -> None:
    slot, header, payload = node.put(3)
    node.sync()
    target = node.tier.allocate(slot.nbytes)
    assert target is not None and finish(lambda done: node.tier.relocate(slot, target, header.key, done)).ok
    must_be_whole(node, target, header, payload)
    node.sync()
    node.tier.free(slot)
    outcome, _ = get(node.tier, target, header.key, PAYLOAD_BYTES)
    assert outcome.header is not None
    node.tier.publish_again(target, outcome.header)
    node.sync()
    found = node.reopen()
    must_be_whole(node, found[header.key], header, payload)
    node.tier.quarantine(found[header.key], "to see it survive")
    node.sync()
    assert not node.reopen()
    (kept,) = node.tier.quarantined()
    described = node.tier.describe_quarantined(kept)
    assert described is not None and (described.key, described.tenant) == (header.key, header.tenant)
    assert header.key not in b"".join(path.read_bytes() for path in node.path.rglob("*.slab"))


def test_without_its_key_a_block_is_unreadable_and_no_damage(node: Node) -> None:
    slot, header, _ = node.put(1)
    other, _, _ = node.put(2, b"b" * 16)
    node.sync()
    assert node.keys.destroy(b"a" * 16) and not node.keys.destroy(b"a" * 16)
    assert node.read(slot, header.key)[0] is OutcomeKind.UNREADABLE
    assert node.read(other, name(2))[0] is OutcomeKind.DONE
    assert set(node.reopen()) == {name(2)}
    assert node.tier.recovery_report.lost_blocks == 1
    assert "1 blocks that no key opens" in node.tier.recovery_report.sentence()
    assert node.tier.statistics().blocks == 1
    node.tier.close()
    assert check_directory(node.path, verify_payloads=True) == []


def test_what_is_written_while_a_tenant_is_dropped_is_readable_to_nobody(node: Node) -> None:
    """Blocks that are in DRAM alone are still on their way to NVMe then."""
    for tenant in (b"a" * 16, b"c" * 16):
        node.put(1, tenant=b"a" * 16)
        node.keys.destroy(tenant)
        slot, header, _ = node.put(2, tenant)
        assert node.read(slot, header.key)[0] is OutcomeKind.UNREADABLE
        node.keys.begin_anew(tenant)
        slot, header, payload = node.put(3, tenant)
        must_be_whole(node, slot, header, payload)
        node.sync()
        assert set(node.reopen()) >= {name(3)} and name(2) not in node.reopen()


@pytest.mark.parametrize("failpoint", ["file.keys=error:EIO@1", "keys.written=error:EIO@1"])
def test_a_key_that_cannot_be_destroyed_is_kept_and_opens_its_blocks_after_a_restart(
    node: Node, failpoint: str
) -> None:
    _, header, payload = node.put(1)
    node.sync()
    failpoints.arm(failpoint)
    with pytest.raises(OSError):
        node.keys.destroy(header.tenant)
    failpoints.disarm()
    must_be_whole(node, node.reopen()[header.key], header, payload)


def test_a_tier_without_keys_keeps_encrypted_blocks_or_refuses(node: Node) -> None:
    node.put(1)
    node.sync()
    node.tier.close()
    before = {path: path.read_bytes() for path in node.path.rglob("*.slab")}
    with pytest.raises(DirectoryUnusable, match="1 encrypted blocks and their keys are not here"):
        NvmeTier.open(node.path, CAPACITY_BYTES, keys=NoDataKeys(are_complete=False))
    repairing = NvmeTier.open(node.path, CAPACITY_BYTES)
    assert len(list(repairing.recover())) == 1
    repairing.close()
    assert before == {path: path.read_bytes() for path in before}
    node.tier = node.open()
    assert len(list(node.tier.recover())) == 1


def test_a_device_is_lent_no_encrypted_block(node: Node) -> None:
    slot, _, _ = node.put(1)
    assert node.tier.info.lends_files, "blocks that are not encrypted may be read by a device"
    outcome = finish(lambda done: node.tier.lend(slot, lambda image, ended: ended(None), done))  # type: ignore[arg-type]
    assert outcome.kind is OutcomeKind.FAILED and not outcome.errno and "AES-GCM" in outcome.message


def test_the_form_of_a_sealed_slot_stays() -> None:
    raw = GOLDEN.read_bytes()
    sealed = read_header(raw[:HEADER_BYTES])
    assert isinstance(sealed, BlockHeader) and sealed.codec == SEALED
    buffer = AlignedBuffer(sealed.stored_bytes)
    put_bytes(buffer.address, raw[HEADER_BYTES : HEADER_BYTES + sealed.stored_bytes])
    key = DataKey(b"number-1", b"k" * 32)
    opened = key.open(sealed, name(1), [buffer.segment(buffer.nbytes)])
    assert isinstance(opened, BlockHeader)
    assert (opened.key, opened.parent, opened.tokens) == (name(1), name(0), np.arange(64, dtype="<i4").tobytes())
    assert buffer_at(buffer.address, sealed.stored_bytes).raw == bytes(range(200))


HEADERS = st.builds(
    BlockHeader,
    key=st.binary(min_size=16, max_size=16).filter(any),
    parent=st.binary(min_size=16, max_size=16),
    extra=st.sampled_from([bytes(16), b"x" * 16]),
    fingerprint=st.binary(min_size=32, max_size=32),
    tenant=st.binary(min_size=16, max_size=16),
    payload_bytes=st.integers(0, 3000),
    tokens=st.binary(max_size=960).map(lambda raw: raw[: len(raw) // 4 * 4]),
    depth=st.integers(0, 1 << 20),
    generation=st.integers(1, 1 << 50),
    checksum=st.integers(1, (1 << 64) - 1),
    created_ns=st.integers(0, 1 << 62),
    kept=st.integers(0, (1 << 40) - 1),
)


@settings(max_examples=60, deadline=None)
@given(header=HEADERS, coded=st.booleans(), cut=st.integers(0, 3000), other=st.binary(min_size=16, max_size=16))
def test_a_seal_gives_back_what_it_got_under_its_own_key_alone(
    header: BlockHeader, coded: bool, cut: int, other: bytes
) -> None:
    nbytes = header.payload_bytes
    if coded:
        header = BlockHeader(**{**header.__dict__, "coded": Coded(3, nbytes, 77), "payload_bytes": nbytes + 9})
    key, stored = DataKey(b"number-1", b"k" * 32), os.urandom(nbytes)
    source, target = AlignedBuffer(slot_bytes(nbytes)), AlignedBuffer(slot_bytes(nbytes))
    put_bytes(source.address, stored)
    cut = min(cut, nbytes)
    whole = source.segment(nbytes)
    sealed = key.seal(header, [whole.part(0, cut), whole.part(cut, nbytes - cut)], target.segment(nbytes))
    assert sealed.codec == SEALED | header.codec and sealed.stored_bytes == nbytes
    assert read_header(sealed.pack()) == sealed
    assert sealed.stored_checksum == checksum_at(target.address, nbytes)
    cipher = buffer_at(target.address, nbytes).raw if nbytes else b""
    for wrong, name in ((DataKey(b"number-1", b"w" * 32), header.key), (key, other)):
        if name != header.key or wrong is not key:
            put_bytes(target.address, cipher)
            assert isinstance(wrong.open(sealed, name, [target.segment(nbytes)]), str)
    put_bytes(target.address, cipher)
    assert key.open(sealed, header.key, [target.segment(nbytes)]) == header
    assert not nbytes or buffer_at(target.address, nbytes).raw == stored
    assert key.unveil(key.veil(header.parent)) == header.parent
