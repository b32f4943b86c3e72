"""The conformance suite of codecs; it also tests the tiers with the codec.

    class TestMine(CodecContract):
        def make_codec(self) -> Codec: ...

A codec that a daemon can use is listed in `kvstore_tiers.codecs`; the suite finds it there by its number.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, payload_checksum, read_header, slot_bytes
from kvstore_tiers.base import Outcome, OutcomeKind, Segment, Slot, Tier
from kvstore_tiers.codecs import Codec, CodingError, NotReadable, Undecodable, codec_named, codec_numbered, images
from kvstore_tiers.codecs.frames import FORM_OFFSET, FRAME_VERSION_OFFSET, LayeredCodec
from kvstore_tiers.codecs.images import view
from kvstore_tiers.codecs.shapes import PayloadShape
from kvstore_tiers.host import HostTier
from kvstore_tiers.image import stamp_header
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import AlignedBuffer, Bytes, view_at
from kvstore_tiers.testing.kv_blocks import SHAPES, extreme_blocks, kv_block, numbers_of
from kvstore_tiers.testing.transfers import block_with_pattern, encoded, finish, get, pieces, put_encoded

CAPACITY_BYTES = 8 << 20
SIZES_BYTES = (1, 4096, 5000, 40_000, 300_000)
NUMBERS = range(2, 26)
ROUNDS = 200
UNKNOWN = 253  # a number that no codec has


class CodecContract(ABC):
    """A test suite that every codec (an encoder of block payloads) must pass. A subclass defines `make_codec`."""

    @abstractmethod
    def make_codec(self) -> Codec: ...

    # The codec alone

    def test_it_is_listed_under_its_name_and_number(self) -> None:
        codec = self.make_codec()
        assert 1 <= codec.number <= 255 and not codec.lacks()
        assert type(codec_named(codec.name)) is type(codec_numbered(codec.number)) is type(codec)

    def test_payloads_come_back_and_no_byte_is_written_beyond_the_bound(self) -> None:
        codec, coded = self.make_codec(), 0
        for header, payload, shape in [*_blocks(), *extreme_blocks()]:
            stored, error = self._stored(codec, header, payload, shape)
            if not stored:
                continue
            coded += 1
            back = self._decoded(codec, stored, payload.nbytes)
            if not codec.is_lossy:
                assert np.array_equal(back, payload) and error is None, shape
            else:
                assert error is not None and shape is not None and error == codec.error(memoryview(stored))
                _within(error, shape, payload, back)
            assert np.array_equal(back, self._decoded(codec, stored, payload.nbytes)), "decoding is repeatable"
        assert coded >= 10, "the suite has proved little: most payloads were stored as they are"

    def test_every_layer_is_decoded_alone_as_in_the_whole(self) -> None:
        codec = self.make_codec()
        for header, payload, shape in [*_blocks(), *extreme_blocks()]:
            stored, _ = self._stored(codec, header, payload, shape)
            if not stored:
                continue
            layers, whole = codec.layers(memoryview(stored)), self._decoded(codec, stored, payload.nbytes)
            assert layers == 1 or (shape is not None and layers == shape.layers)
            for layer, expected in enumerate(whole.reshape(layers, -1)):
                alone = np.zeros_like(expected)
                codec.decode_layer(memoryview(stored), layer, alone.data)
                assert np.array_equal(alone, expected), (shape, layer)

    def test_a_payload_of_another_length_is_refused_before_memory_is_taken(self) -> None:
        codec = self.make_codec()
        for header, payload, shape in [*_blocks()][::3]:
            stored, _ = self._stored(codec, header, payload, shape)
            for other in (payload.nbytes + 64, payload.nbytes // 2):
                if stored:
                    with suppress(Undecodable):
                        codec.decode(memoryview(stored), memoryview(bytearray(other)))
                        raise AssertionError(f"{payload.nbytes} bytes were decoded as {other}")

    def test_spoilt_bytes_are_refused_or_give_a_payload_of_the_right_length(self) -> None:
        """Check that the codec neither crashes nor writes past the payload when its input is damaged. Checksums find
        damage that the codec does not."""
        codec, chosen = self.make_codec(), random.Random(7)
        for header, payload, shape in [*_blocks()][::3]:
            stored, _ = self._stored(codec, header, payload, shape)
            for _ in range(ROUNDS // 10 if stored else 0):
                spoilt = bytearray(stored)
                for _ in range(chosen.randint(1, 4)):
                    spoilt[chosen.randrange(len(spoilt))] = chosen.randrange(256)
                del spoilt[chosen.randint(1, len(spoilt)) :]
                self._refused_or_decoded(codec, spoilt, payload.nbytes)

    def _refused_or_decoded(self, codec: Codec, spoilt: bytearray, payload_bytes: int) -> None:
        room = AlignedBuffer(payload_bytes + 1)
        marked = view_at(room.address, payload_bytes + 1)
        marked[payload_bytes] = 0xA5
        for decode in (codec.decode, codec.decode_and_hash):
            try:
                decode(memoryview(spoilt), view(room.address, payload_bytes))
            except (Undecodable, NotReadable) as error:
                assert str(error), "an operator is told in what way"
            assert marked[payload_bytes] == 0xA5

    def _stored(
        self, codec: Codec, header: BlockHeader, payload: Bytes, shape: PayloadShape | None
    ) -> tuple[bytes, CodingError | None]:
        """Return the form of a payload, b"" for one that is stored as it is, and its error."""
        bound = codec.bound(payload.nbytes)
        room = AlignedBuffer(bound + 1)
        marked = view_at(room.address, bound + 1)
        marked[:] = 0xA5
        length, error = codec.encode(header, shape, payload.data, view(room.address, bound))
        assert 0 <= length <= bound and marked[bound] == 0xA5
        return marked[:length].tobytes(), error

    def _decoded(self, codec: Codec, stored: bytes, payload_bytes: int) -> Bytes:
        back = np.full(payload_bytes, 0x5A, np.uint8)
        codec.decode(memoryview(stored), back.data)
        hashed = np.full(payload_bytes, 0xA5, np.uint8)
        assert codec.decode_and_hash(memoryview(stored), hashed.data) == payload_checksum(back)
        assert np.array_equal(hashed, back)
        return back

    # In tiers

    def test_tiers_keep_its_bytes_and_give_the_payload_back(self, tmp_path: Path) -> None:
        for tier in self._tiers(tmp_path):
            with closing(tier):
                codec, smaller = self.make_codec(), 0
                for header, payload, shape in _blocks():
                    slot = put_encoded(tier, codec, header, payload, shape)
                    assert slot is not None
                    is_smaller = slot.nbytes < slot_bytes(payload.nbytes)
                    smaller += is_smaller
                    self._holds(tier, slot, header, self._given_back(header, payload, shape) if is_smaller else payload)
                    tier.free(slot)
                assert smaller, "no block took a smaller slot: the suite has proved nothing"

    def test_a_copy_in_another_slot_keeps_the_form(self, tmp_path: Path) -> None:
        for tier in self._tiers(tmp_path):
            with closing(tier):
                slot, header, payload = self._coded(tier)
                target = tier.allocate(slot.nbytes)
                assert target is not None and finish(tier.sync).ok
                outcome = finish(partial(tier.relocate, slot, target, header.key))
                assert outcome.ok and outcome.header is not None and outcome.header.codec == self.make_codec().number
                tier.free(slot)
                self._holds(tier, target, header, payload)

    def test_a_restart_keeps_the_form_and_the_size(self, tmp_path: Path) -> None:
        with closing(_nvme(tmp_path)) as tier:
            slot, header, payload = self._coded(tier)
            assert finish(tier.sync).ok
        with closing(_nvme(tmp_path)) as tier:
            blocks = tier.recover_columns()
            codec, stored_bytes, _ = blocks.form_of(0)
            assert (len(blocks), codec) == (1, self.make_codec().number)
            assert HEADER_BYTES + stored_bytes <= int(blocks.nbytes[0]) == slot.nbytes
            assert int(blocks.payload_bytes[0]) == payload.nbytes
            self._holds(tier, blocks.slot_of(0), header, payload)

    # Damage

    def test_a_flipped_stored_byte_is_never_served(self, tmp_path: Path) -> None:
        def flip(image: Bytes, header: BlockHeader) -> None:
            image[HEADER_BYTES + header.stored_bytes // 2] ^= 0x10

        self._refused(tmp_path, flip, OutcomeKind.CORRUPT, "the stored bytes' checksum does not hold")

    def test_another_payload_than_the_header_names_is_never_served(self, tmp_path: Path) -> None:
        def rename(image: Bytes, header: BlockHeader) -> None:
            _stamp(image, replace(header, checksum=header.checksum ^ 1))

        self._refused(tmp_path, rename, OutcomeKind.CORRUPT, "gives back is not the payload")

    def test_bytes_that_it_cannot_decode_are_never_served(self, tmp_path: Path) -> None:
        def fill(image: Bytes, header: BlockHeader) -> None:
            stored = image[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
            stored[:] = 0xFF
            assert header.coded is not None
            _stamp(image, replace(header, coded=header.coded._replace(checksum=payload_checksum(stored.tobytes()))))

        self._refused(tmp_path, fill, OutcomeKind.CORRUPT, f"codec {self.make_codec().name} ")

    def test_a_codec_that_this_build_lacks_is_no_damage(self, tmp_path: Path) -> None:
        def rename(image: Bytes, header: BlockHeader) -> None:
            assert header.coded is not None
            _stamp(image, replace(header, coded=header.coded._replace(codec=UNKNOWN)))

        self._refused(tmp_path, rename, OutcomeKind.UNREADABLE, f"codec {UNKNOWN}, which this kvstored does not have")

    def test_a_codec_that_fails_for_now_is_no_damage(self, tmp_path: Path) -> None:
        lacking = MemoryError("no memory for now")
        failing = mock.Mock(decode=mock.Mock(side_effect=lacking), decode_and_hash=mock.Mock(side_effect=lacking))
        with mock.patch.object(images, "codec_numbered", lambda _: failing):
            self._refused(tmp_path, lambda *_: None, OutcomeKind.FAILED, "no memory for now")

    def test_a_form_of_a_newer_version_is_no_damage(self, tmp_path: Path) -> None:
        codec = self.make_codec()
        if not isinstance(codec, LayeredCodec):
            return

        for place, size in ((FRAME_VERSION_OFFSET, 1), (FORM_OFFSET, 4)):

            def renew(image: Bytes, header: BlockHeader, place: int = place, size: int = size) -> None:
                stored = image[HEADER_BYTES : HEADER_BYTES + header.stored_bytes]
                stored[place : place + size] = 0xEE
                assert header.coded is not None
                _stamp(image, replace(header, coded=header.coded._replace(checksum=payload_checksum(stored.tobytes()))))

            self._refused(tmp_path / str(place), renew, OutcomeKind.UNREADABLE, "version")

    def _refused(self, path: Path, spoil: Callable[[Bytes, BlockHeader], None], kind: OutcomeKind, why: str) -> None:
        """Store an image that `spoil` has changed, read it from each tier, and expect the outcome `kind` with `why` in
        its message. A tier stores any image that it is given."""
        for tier in self._tiers(path):
            with closing(tier):
                codec = self.make_codec()
                header, payload, shape = _compressible()
                image = encoded(codec, header, payload, shape)
                raw = view_at(image.address, image.nbytes)
                coded = _header_of(raw)
                spoil(raw, coded)
                again = _header_of(raw)
                slot = tier.allocate(image.nbytes)
                assert slot is not None
                stored = Segment(image.address + HEADER_BYTES, again.stored_bytes, owner=image)
                written = finish(partial(tier.write, slot, again, [stored]))
                assert written.ok, written
                outcome, _ = get(tier, slot, header.key, payload.nbytes)
                assert outcome.kind is kind and why in outcome.message, outcome
                assert "\n" not in outcome.message

    def _holds(self, tier: Tier, slot: Slot, header: BlockHeader, payload: Bytes) -> None:
        outcome, back = get(tier, slot, header.key, payload.nbytes)
        assert outcome.ok and np.array_equal(back, payload), outcome
        assert outcome.header is not None and outcome.header.codec == 0
        scattered = np.zeros_like(payload)
        cuts = (payload.nbytes // 3, payload.nbytes // 2)
        outcome = finish(lambda done: tier.read(slot, header.key, pieces(scattered, *cuts), done))
        assert outcome.ok and np.array_equal(scattered, payload), outcome
        whole = AlignedBuffer(slot_bytes(payload.nbytes))
        outcome = finish(lambda done: tier.move_out(slot, whole.segment(whole.nbytes), header.key, done))
        assert _is_image_of(outcome, whole, header, payload), outcome

    def _coded(self, tier: Tier) -> tuple[Slot, BlockHeader, Bytes]:
        header, payload, shape = _compressible()
        slot = put_encoded(tier, self.make_codec(), header, payload, shape)
        assert slot is not None and slot.nbytes < slot_bytes(payload.nbytes)
        return slot, header, self._given_back(header, payload, shape)

    def _given_back(self, header: BlockHeader, payload: Bytes, shape: PayloadShape | None) -> Bytes:
        codec = self.make_codec()
        stored, _ = self._stored(codec, header, payload, shape) if codec.is_lossy else (b"", None)
        return self._decoded(codec, stored, payload.nbytes) if stored else payload

    def _tiers(self, path: Path) -> Iterator[Tier]:
        yield HostTier(CAPACITY_BYTES, arena_bytes=1 << 20, name="far")
        yield _nvme(path)


def _nvme(path: Path) -> NvmeTier:
    return NvmeTier.open(path / "nvme", CAPACITY_BYTES, slab_bytes=1 << 20)


def _blocks() -> Iterator[tuple[BlockHeader, Bytes, PayloadShape | None]]:
    """Make blocks whose shape is not known, and blocks of K and V."""
    for number in NUMBERS:
        yield *block_with_pattern(number, SIZES_BYTES[number % len(SIZES_BYTES)]), None
    for number, shape in enumerate(SHAPES * 2):
        yield kv_block(number + 2, shape)


def _within(error: CodingError, shape: PayloadShape, payload: Bytes, back: Bytes) -> None:
    """Expect the error of what came back to be the one that was reported; other layers are bit by bit as they were."""
    squares, differences, most = 0.0, 0.0, 0.0
    for tensor in shape.tensors:
        put, got = (numbers_of(tensor, each.reshape(shape.layers, shape.layer_bytes)) for each in (payload, back))
        odd = ~np.isfinite(put)
        assert np.array_equal(odd, ~np.isfinite(got))
        put, got = np.where(odd, 0.0, put), np.where(odd, 0.0, got)
        squares += float(np.sum(put * put))
        differences += float(np.sum((put - got) ** 2))
        most = max(most, float(np.max(np.abs(put - got))))
    assert most <= error.max_abs * 1.0001 and differences <= (error.relative_rms * 1.001) ** 2 * squares, (error, most)


def _compressible() -> tuple[BlockHeader, Bytes, PayloadShape]:
    """Return a block that any codec makes much smaller: of K and V whose tokens are all alike."""
    header, payload, shape = kv_block(4, SHAPES[0])
    for tensor in shape.tensors:
        numbers = tensor.of(payload.reshape(shape.layers, shape.layer_bytes))
        numbers[:] = numbers[:, :1]
    return header, payload, shape


def _header_of(image: Bytes) -> BlockHeader:
    header = read_header(image[:HEADER_BYTES].tobytes())
    assert isinstance(header, BlockHeader) and header.codec, header
    return header


def _stamp(image: Bytes, header: BlockHeader) -> None:
    stamp_header(Segment(image.ctypes.data, image.nbytes), header)


def _is_image_of(outcome: Outcome, image: AlignedBuffer, header: BlockHeader, payload: Bytes) -> bool:
    raw = view_at(image.address, image.nbytes)
    found = read_header(raw)
    is_there = isinstance(found, BlockHeader) and (found.key, found.codec) == (header.key, 0)
    return outcome.ok and is_there and np.array_equal(raw[HEADER_BYTES : HEADER_BYTES + payload.nbytes], payload)
