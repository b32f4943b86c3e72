"""Conversations: their tokens and K/V, all made of their number; stored in a real daemon and counted with their bytes
compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup, PutReceipt, Session

if TYPE_CHECKING:
    from tests.reference.running_daemon import RunningDaemon

LAYERS = 4
TOKENS_A_BLOCK = 64


def model(name: str = "weights", *, kib_a_block: int = 16, **fields: Any) -> Fingerprint:
    """A fingerprint whose blocks have 64 tokens and `kib_a_block` KiB of payload in four layers."""
    bytes_a_token = kib_a_block * 1024 // TOKENS_A_BLOCK // LAYERS
    group = LayerGroup(0, "full", 0, tuple(range(LAYERS)), bytes_a_token)
    return Fingerprint("test model", name, groups=(group,), **fields)


def tokens_of(conversation: int, blocks: int) -> npt.NDArray[np.int32]:
    """Token ids of a prefix that no other conversation shares; a longer one of the same number continues it."""
    return np.arange(blocks * TOKENS_A_BLOCK, dtype=np.int32) + 1000 * conversation


def payloads_of(
    conversation: int, blocks: int, fingerprint: Fingerprint, first: int = 0
) -> list[npt.NDArray[np.uint8]]:
    """Return the payloads of blocks `first`, first + 1, ... of a conversation hold: a function of their names alone."""
    size = fingerprint.payload_bytes()
    return [
        np.random.default_rng((conversation, block)).integers(0, 256, size, dtype=np.uint8)
        for block in range(first, first + blocks)
    ]


def holds(lease: kvstore_client.Lease, expected: Sequence[npt.NDArray[np.uint8]]) -> bool:
    """Return whether a lease has exactly these payloads."""
    return len(lease) == len(expected) and all(
        np.array_equal(lease.payload(block), payload) for block, payload in enumerate(expected)
    )


def put_conversation(session: Session, conversation: int, blocks: int, **options: Any) -> PutReceipt:
    """Store the first `blocks` blocks; all of them must be visible then. `options` go to `Session.put`."""
    payloads = payloads_of(conversation, blocks, session.fingerprint)
    receipt = session.put(tokens_of(conversation, blocks), payloads=payloads, **options)
    assert receipt.visible_blocks == blocks, receipt
    return receipt


def found_blocks(session: Session, conversation: int, blocks: int) -> int:
    """Return how many of the first `blocks` blocks a get finds, from the first on; their bytes must be right."""
    with session.get(tokens_of(conversation, blocks)) as lease:
        assert holds(lease, payloads_of(conversation, len(lease), session.fingerprint)), "wrong bytes"
        return len(lease)


def serves_whole(daemon: RunningDaemon, conversation: int, blocks: int) -> bool:
    """Return whether a new client finds these blocks, all of them; their bytes must be right."""
    with daemon.connect() as session:
        return found_blocks(session, conversation, blocks) == blocks
