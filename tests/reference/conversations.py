"""Conversations in a real daemon: store the blocks of one, and count those that a get finds, bytes compared."""

from __future__ import annotations

from typing import Any

from kvstore_client import PutReceipt, Session
from tests.reference.running_daemon import holds, payloads_of, tokens_of


def put_conversation(session: Session, conversation: int, blocks: int, **options: Any) -> PutReceipt:
    """Store the first `blocks` blocks; all of them must be visible then. `options` are those of `Session.put`."""
    payloads = payloads_of(conversation, blocks, session.fingerprint)
    receipt = session.put(tokens_of(conversation, blocks), payloads=payloads, **options)
    assert receipt.visible_blocks == blocks, receipt
    return receipt


def found_blocks(session: Session, conversation: int, blocks: int) -> int:
    """How many of the first `blocks` blocks a get finds, from the first on; their bytes must be right."""
    with session.get(tokens_of(conversation, blocks)) as lease:
        assert holds(lease, payloads_of(conversation, len(lease), session.fingerprint)), "wrong bytes"
        return len(lease)
