"""Driving a tier from a test: make a block, start a transfer, wait for its outcome. Never judges an outcome."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kvstore_proto.arena import BlockHeader, slot_bytes
from kvstore_tiers.base import Completion, Outcome, Slot, Tier
from kvstore_tiers.segments import Bytes, Segment, segment_of

PATIENCE_S = 60.0


def finish(start: Callable[[Completion], None]) -> Outcome:
    """Start one transfer and wait for its outcome."""
    return finish_all([start])[0]


def finish_all(starts: Sequence[Callable[[Completion], None]]) -> list[Outcome]:
    """Start transfers together. Return all outcomes, in order. Raises AssertionError when a transfer never ends or ends
    twice.
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


def block(number: int, payload_bytes: int, *, tokens: int = 4) -> tuple[BlockHeader, Bytes]:
    """Make block `number`, with a payload that only this number and size give."""
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


def put(tier: Tier, header: BlockHeader, payload: Bytes, owner: str = "") -> Slot | None:
    """Allocate a slot and write the block. Return the slot, or None when there is no room. Raises AssertionError when
    the write fails.
    """
    slot = tier.allocate(slot_bytes(payload.nbytes), owner)
    if slot is not None:
        outcome = finish(lambda done: tier.write(slot, header, [segment_of(payload)], done))
        assert outcome.ok, outcome
    return slot


def get(tier: Tier, slot: Slot, key: bytes, payload_bytes: int) -> tuple[Outcome, Bytes]:
    """Read a block into fresh memory. Return the outcome and the bytes."""
    destination = np.zeros(payload_bytes, dtype=np.uint8)
    return finish(lambda done: tier.read(slot, key, [segment_of(destination)], done)), destination


def pieces(array: Bytes, *cuts: int) -> list[Segment]:
    """Return the array as a scatter list, cut at these offsets."""
    bounds = [0, *cuts, array.nbytes]
    return [segment_of(array[a:b]) for a, b in pairwise(bounds)]
