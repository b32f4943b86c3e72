"""Damage to the stored form of each codec: what a tier serves is right, or it is a miss; and no decoder crashes.

Owns two kinds of rounds. In an *image* round the slots of slower memory and of an NVMe tier, both with blocks in the
form of a codec, are damaged and read. In a *frame* round spoilt frames go to a decoder directly, without the checksums
that a tier verifies before; whole, or one layer of it. The judge is the payload that the codec gave back when it was
sound. A decoder that dies takes this process with it, which makes the run a failure.
"""

from __future__ import annotations

import os
import resource
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, slot_bytes
from kvstore_tiers.base import OutcomeKind, Slot, Tier
from kvstore_tiers.codecs import CODECS, Codec, NotReadable, Undecodable, codec_named
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.codecs.shapes import PayloadShape
from kvstore_tiers.host import HostTier
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.segments import view_at
from kvstore_tiers.testing.kv_blocks import SHAPES, kv_block, kv_shape
from kvstore_tiers.testing.transfers import encoded, get, put_encoded
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.kill_model import Bytes
from torture_runs.slot_damage import SLOT_DAMAGES, SlotBytes

CAPACITY_BYTES, CONTAINER_BYTES = 32 << 20, 1 << 20
BLOCKS = 6  # of each codec
FRAMES_A_ROUND = 500
MOST_GROWTH_BYTES = 512 << 20
_GRADED = kv_shape(4, 64, 2, 32, "f16")._replace(bears=bytes((0, 8, 4, 8, 4, 4, 0, 0)))  # by the profile of a model
_SHAPES = (_GRADED, *SHAPES, kv_shape(4, 64, 2, 32, "f16"), kv_shape(4, 64, 2, 32, "bf16"))


@dataclass(frozen=True)
class Stored:
    """A block in the form of a codec: what was put, its whole image, and the payload that decoding gives."""

    codec: Codec
    header: BlockHeader
    raw: Bytes
    shape: PayloadShape
    image: Bytes
    used_bytes: int
    payload: Bytes

    @property
    def frame(self) -> Bytes:
        return self.image[HEADER_BYTES : self.used_bytes]


def torture(assignment: Assignment, figures: Figures) -> None:
    """Damage and decode until time or count is up. Figures: `corruptions`, `served_wrong`, `frames_fuzzed`."""
    rng, clock = np.random.default_rng(assignment.seed), Clock(assignment)
    wait_for_library()
    figures.add("served_wrong", 0)
    blocks = [made for name in CODECS for made in _blocks(name)]
    memory_bytes = _memory_bytes()
    with (
        closing(HostTier(CAPACITY_BYTES, arena_bytes=CONTAINER_BYTES, name="far")) as far,
        closing(NvmeTier.open(assignment.directory / "nvme", CAPACITY_BYTES, slab_bytes=CONTAINER_BYTES)) as nvme,
    ):
        slots = {id(tier): [_put(tier, block) for block in blocks] for tier in (far, nvme)}
        while clock.goes_on(figures.counts["corruptions"]):
            for tier in (far, nvme):
                _image_round(rng, tier, assignment.directory / "nvme", blocks, slots[id(tier)], figures)
            _frame_round(rng, blocks, figures)
            grown_bytes = _memory_bytes() - memory_bytes
            if grown_bytes > MOST_GROWTH_BYTES:
                figures.fail("corruption_store_failures", f"decoders took {grown_bytes >> 20} MiB")
            figures.heartbeat()


def _blocks(name: str) -> list[Stored]:
    codec = codec_named(name)
    assert codec is not None
    made: list[Stored] = []
    for number, shape in enumerate(_SHAPES * 2, 1):
        header, payload, _ = kv_block(1000 * codec.number + number, shape)
        if codec.lacks() or len(made) == BLOCKS:
            break
        image = encoded(codec, header, payload, shape)
        if image.nbytes == slot_bytes(payload.nbytes):
            continue
        target = np.zeros(codec.bound(payload.nbytes), np.uint8)
        length, _ = codec.encode(header, shape, payload.data, target.data)
        back = np.zeros_like(payload)
        codec.decode(target[:length].data, back.data)
        whole = view_at(image.address, image.nbytes).copy()
        made.append(Stored(codec, header, payload, shape, whole, HEADER_BYTES + length, back))
    return made


def _put(tier: Tier, block: Stored) -> Slot:
    slot = put_encoded(tier, block.codec, block.header, block.raw, block.shape)
    assert slot is not None
    return slot


def _image_round(
    rng: np.random.Generator, tier: Tier, directory: Path, blocks: list[Stored], slots: list[Slot], figures: Figures
) -> None:
    """Damage each block once, read it, and put the bytes back."""
    for block, slot in zip(blocks, slots, strict=True):
        other = blocks[int(rng.integers(len(blocks)))]
        swapped = np.zeros_like(block.image)
        swapped[: other.image.nbytes] = other.image[: swapped.nbytes]
        sound = _swap(tier, directory, slot, None)
        kind = str(rng.choice([*SLOT_DAMAGES]))
        damaged = SLOT_DAMAGES[kind](rng, SlotBytes(sound, block.used_bytes, np.zeros_like(sound), swapped))
        if np.array_equal(damaged[: block.used_bytes], sound[: block.used_bytes]):
            continue
        _swap(tier, directory, slot, damaged)
        outcome, back = get(tier, slot, block.header.key, block.payload.nbytes)
        _swap(tier, directory, slot, sound)
        figures.add("corruptions")
        figures.add_kind("corruptions_by_kind", f"{block.codec.name}_{kind}")
        if outcome.kind is OutcomeKind.DONE and not np.array_equal(back, block.payload):
            figures.fail("served_wrong", f"{block.codec.name} {kind}")
        elif outcome.kind is not OutcomeKind.DONE:
            figures.add_kind("reads_refused", outcome.kind.name.lower())


def _swap(tier: Tier, directory: Path, slot: Slot, image: Bytes | None) -> Bytes:
    """Return the bytes of a slot, and replace them by `image`."""
    if isinstance(tier, HostTier):
        held = view_at(tier.slot_segment(slot).address, slot.nbytes)
        before = held.copy()
        if image is not None:
            held[: image.nbytes] = image
        return before
    fd = os.open(directory / "slabs" / f"{slot.container:08d}.slab", os.O_RDWR | os.O_CLOEXEC)
    try:
        before = np.frombuffer(os.pread(fd, slot.nbytes, slot.offset), np.uint8)
        if image is not None:
            os.pwrite(fd, image.tobytes(), slot.offset)
    finally:
        os.close(fd)
    return before


def _frame_round(rng: np.random.Generator, blocks: list[Stored], figures: Figures) -> None:
    """Decode spoilt frames; what they give back is not judged, as a tier's checksums are."""
    for _ in range(FRAMES_A_ROUND):
        block = blocks[int(rng.integers(len(blocks)))]
        frame = _spoilt(rng, block.frame)
        figures.add("frames_fuzzed")
        figures.add_kind("frames_fuzzed_by_codec", block.codec.name)
        stored, back = memoryview(frame.tobytes()), np.zeros_like(block.payload)
        try:
            if rng.random() < 0.5:
                block.codec.decode_and_hash(stored, back.data)  # as a tier does
            else:
                layers = block.codec.layers(stored)
                block.codec.decode_layer(stored, int(rng.integers(layers)), back[: back.nbytes // layers].data)
        except (Undecodable, NotReadable):
            figures.add("frames_refused")


def _spoilt(rng: np.random.Generator, frame: Bytes) -> Bytes:
    """Return a frame with a few wrong bytes, most of them in its head and tables; or one that is cut short."""
    spoilt = frame.copy()
    for _ in range(int(rng.integers(1, 6))):
        reach = int(rng.choice([64, 256, 4096, spoilt.nbytes]))
        spoilt[int(rng.integers(min(reach, spoilt.nbytes)))] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
    return spoilt[: int(rng.integers(1, spoilt.nbytes + 1))] if rng.random() < 0.1 else spoilt


def _memory_bytes() -> int:
    """Return the most memory that this process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
