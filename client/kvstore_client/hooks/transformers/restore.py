"""Brings the stored prefix of a sequence into a stack of layers, before the model computes the rest.

Owns the order: lease what is mapped, decide whether to wait for what is in slower tiers, copy, check the lease. Most
prefixes are mapped whole and cost one round trip. Never raises for a miss. Invariant: tokens count as restored only
if their lease was still valid after they were copied.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from kvstore_client.hooks.transformers.layers import KVStack
from kvstore_client.hooks.transformers.storer import Tokens
from kvstore_client.lease import Lease
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.session import Session

LEAST_PROMOTE_S, MOST_PROMOTE_S = 0.25, 10.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """The stack holds the first `held` of `tokens` and is to get at most the first `most`."""

    tokens: Tokens
    held: int
    most: int
    block_tokens: int
    device: torch.device

    @property
    def blocks(self) -> int:
        """Blocks to ask for. The last one may be used in part: a prompt that was stored whole leaves one token."""
        blocks = min(len(self.tokens) // self.block_tokens, -(-self.most // self.block_tokens))
        return blocks if self.covered(blocks) > self.held else 0

    def covered(self, blocks: int) -> int:
        """Tokens in the stack once so many leading blocks are restored."""
        return max(min(blocks * self.block_tokens, self.most), self.held)


@dataclass(frozen=True, slots=True)
class Restored:
    """`tokens` of the sequence are in the stack now; `blocks` of it are stored somewhere."""

    tokens: int
    blocks: int = 0
    bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    reason: str = ""


def restore(session: Session, stack: KVStack, wanted: Wanted, *, deadline_s: float, token_s: float | None) -> Restored:
    """Extend a stack by what is stored.

    `deadline_s` is for the first question. `token_s` is what a token took to compute lately; None when that is unknown:
    then stored blocks are waited for.
    """
    begin = time.perf_counter()
    with session.get(wanted.tokens, max_blocks=wanted.blocks, deadline_s=deadline_s, promote=False) as mapped:
        lookup_s = time.perf_counter() - begin
        stored, reason = mapped.resident_blocks, mapped.reason
        gain = wanted.covered(stored) - wanted.covered(len(mapped))
        worth_s = MOST_PROMOTE_S if token_s is None else gain * token_s
        if gain and mapped.estimated_load_s <= worth_s:
            # Waiting longer for a promotion than computing takes would be worse than never having asked.
            wait_s = min(max(worth_s, LEAST_PROMOTE_S), MOST_PROMOTE_S)
            with session.get(wanted.tokens, max_blocks=stored, deadline_s=wait_s, promote=True) as promoted:
                copied = _copy(promoted, stack, wanted)
        else:
            copied = _copy(mapped, stack, wanted)
            reason = "computing is faster than loading" if gain else reason
    if copied is None:
        return Restored(wanted.held, 0, 0, lookup_s, 0.0, "the lease ended while its blocks were copied")
    tokens = wanted.covered(copied)
    copied_bytes = (tokens - wanted.held) * session.fingerprint.payload_bytes() // wanted.block_tokens
    return Restored(tokens, stored, copied_bytes, lookup_s, time.perf_counter() - begin - lookup_s, reason)


def is_silent(restored: Restored) -> bool:
    """Whether the daemon did not answer in time: asking again soon would cost as much."""
    return restored.reason == REASON_DEADLINE


def _copy(lease: Lease, stack: KVStack, wanted: Wanted) -> int | None:
    """How many leading blocks the stack holds now; None if the lease did not outlive the copy."""
    end = wanted.covered(len(lease))
    if end == wanted.held:
        return 0
    stack.reserve(len(wanted.tokens), wanted.device)
    first = wanted.held // wanted.block_tokens
    payloads = [lease.payload(block) for block in range(first, len(lease))]
    stack.scatter(payloads, wanted.block_tokens, wanted.held, end)
    if not lease.valid:
        return None
    stack.extend_to(end)
    return len(lease)
