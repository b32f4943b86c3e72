"""The module drives a tier from a test: make a block, start a transfer, wait for its outcome. It never judges an
outcome.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kvstore_proto.arena import HEADER_BYTES, BlockHeader, pack_unsummed, payload_checksum, slot_bytes
from kvstore_tiers.base import Completion, Outcome, Slot, Tier
from kvstore_tiers.codecs import Codec
from kvstore_tiers.codecs.images import coded_slot_bytes, encode_image, image_bytes
from kvstore_tiers.codecs.shapes import PayloadShape
from kvstore_tiers.host_transfers import ImageRun
from kvstore_tiers.image import stamp_header
from kvstore_tiers.segments import AlignedBuffer, Bytes, Segment, segment_of, view_at

PATIENCE_S = 60.0


def finish(start: Callable[[Completion], None]) -> Outcome:
    """Start a transfer of a tier, wait until it has ended, and return its outcome. `start(done)` starts it; the tier
    calls `done` at its end.
    """
    return finish_all([start])[0]


def finish_all(starts: Sequence[Callable[[Completion], None]]) -> list[Outcome]:
    """Start several transfers of a tier, wait until all have ended, and return their outcomes in the order of `starts`.
    Each function in `starts` gets a completion, which the tier calls at the transfer's end. Raises AssertionError if a
    transfer never ends or ends twice.
    """
    ended: list[tuple[int, Outcome]] = []
    all_ended = threading.Event()

    def record(position: int, outcome: Outcome) -> None:
        ended.append((position, outcome))
        if len(ended) >= len(starts):
            all_ended.set()  # one wake-up, so that waiting costs the transfers nothing

    for position, start in enumerate(starts):
        start(partial(record, position))
    assert not starts or all_ended.wait(PATIENCE_S), f"{len(starts) - len(ended)} transfers did not end"
    by_position = dict(ended)
    assert len(by_position) == len(ended) == len(starts), "a transfer ended twice"
    return [by_position[position] for position in range(len(starts))]


def image_run(blocks: Sequence[tuple[Slot, BlockHeader, Segment]]) -> ImageRun:
    """Return a run for `HostTier.write_many` of blocks that each have a slot, a header and a payload."""
    images = ImageRun()
    for slot, header, payload in blocks:
        pack_unsummed(
            images.add([slot], [payload.address], payload.nbytes, payload), keys=[header.key],
            parents=[header.parent], extras=[header.extra], fingerprint=header.fingerprint, tenant=header.tenant,
            group=header.group, payload_bytes=header.payload_bytes, tokens=[header.tokens], depth=header.depth,
            generations=[slot.generation], created_ns=header.created_ns, kept=header.kept,
        )  # fmt: skip
    return images


def block(number: int, payload_bytes: int, *, tokens: int = 4) -> tuple[BlockHeader, Bytes]:
    """Return the header and the payload of the test block `number`. The payload's `payload_bytes` bytes are determined
    by the number and the size; `tokens` is the number of its tokens.
    """
    payload = np.random.default_rng([number, payload_bytes]).integers(0, 256, payload_bytes, dtype=np.uint8)
    header = BlockHeader(
        key=number.to_bytes(16, "big"),
        parent=max(0, number - 1).to_bytes(16, "big"),
        fingerprint=bytes([number % 251]) * 32,
        tenant=b"tenant".ljust(16, b"\0"),
        tokens=np.arange(number, number + tokens, dtype="<i4").tobytes(),
        payload_bytes=payload_bytes,
        depth=number % 7,
        created_ns=1_000_000 + number,
    )
    return header, payload


def block_with_pattern(number: int, payload_bytes: int) -> tuple[BlockHeader, Bytes]:
    """Return the header and the payload of the test block `number`. Depending on the number, none, half or all of the
    payload is one pattern again and again, which codecs make small."""
    header, payload = block(number, payload_bytes)
    repeated = payload_bytes * (number // 2 % 3) // 2
    payload[:repeated] = np.resize(payload[:16], repeated)
    return header, payload


def as_it_is(header: BlockHeader, payload: Bytes) -> AlignedBuffer:
    """Return the slot image (header page and payload) of a block that is stored without a codec, in a buffer of the
    slot's size.
    """
    image = AlignedBuffer(slot_bytes(payload.nbytes))
    if payload.nbytes:
        view_at(image.address + HEADER_BYTES, payload.nbytes)[:] = payload
    stamp_header(image.segment(image.nbytes), header, payload_checksum(payload))
    return image


def encoded(codec: Codec, header: BlockHeader, payload: Bytes, shape: PayloadShape | None = None) -> AlignedBuffer:
    """Return the slot image of a block in the form of `codec`, or as it is when the coded slot would not be smaller.
    `shape` is the shape of its payload, None if it is not known. The buffer has the size of the slot."""
    raw = as_it_is(header, payload)
    target = AlignedBuffer(image_bytes(codec, payload.nbytes))
    outcome = encode_image(codec, lambda *_: shape, raw.segment(raw.nbytes), header.key, target.segment(target.nbytes))
    assert outcome.ok and outcome.header is not None, outcome
    if not outcome.header.codec:
        return raw
    image = AlignedBuffer(coded_slot_bytes(payload.nbytes, outcome.header.stored_bytes))
    used_bytes = HEADER_BYTES + outcome.header.stored_bytes
    view_at(image.address, used_bytes)[:] = view_at(target.address, used_bytes)
    return image


def put_encoded(
    tier: Tier, codec: Codec, header: BlockHeader, payload: Bytes, shape: PayloadShape | None = None
) -> Slot | None:
    """Allocate a slot of `tier`, write the block in the form of `codec` and return the slot; None if there is no room.
    `shape` is as in `encoded`. Raises AssertionError if the write fails."""
    image = encoded(codec, header, payload, shape)
    slot = tier.allocate(image.nbytes)
    if slot is not None:
        outcome = finish(lambda done: tier.move_in(slot, image.segment(image.nbytes), header.key, done))
        assert outcome.ok, outcome
    return slot


def put(tier: Tier, header: BlockHeader, payload: Bytes, owner: str = "") -> Slot | None:
    """Allocate a slot of `tier` for `owner`, write the block into it and return the slot. Return None if the tier has
    no room. Raises AssertionError if the write fails.
    """
    slot = tier.allocate(slot_bytes(payload.nbytes), owner)
    if slot is not None:
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))
        assert outcome.ok, outcome
    return slot


def get(tier: Tier, slot: Slot, key: bytes, payload_bytes: int) -> tuple[Outcome, Bytes]:
    """Read the block with the key `key` and `payload_bytes` bytes from `slot` of `tier`. Return the outcome of the read
    and the bytes.
    """
    destination = np.zeros(payload_bytes, dtype=np.uint8)
    return finish(lambda done: tier.read(slot, key, [segment_of(destination)], done)), destination


def pieces(array: Bytes, *cuts: int) -> list[Segment]:
    """Return the memory of `array` as a list of segments, cut at the byte offsets `cuts`."""
    bounds = [0, *cuts, array.nbytes]
    return [segment_of(array[a:b]) for a, b in pairwise(bounds)]
