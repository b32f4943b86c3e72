"""Load the stored prefix of a sequence into a stack of layers, as far as that is faster than computing it.

A miss raises nothing. Invariant: tokens count as restored only if their lease was still valid after they were copied.
With `beside` that is known only at the end: `Copying.finish` returns it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from kvstore_client.results import REASON_DEADLINE
from kvstore_client.session import Session
from kvstore_connectors.load import Leased, Prompt, lease_by_choice
from kvstore_connectors.transformers.copies import Span
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.storer import Tokens
from kvstore_restore.choice import LoadChoice

ENDED = "the lease ended while its blocks were copied"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to restore: the stack holds the first `held` of `tokens` and shall get at most the first `most`."""

    tokens: Tokens
    held: int
    most: int
    block_tokens: int
    device: torch.device

    @property
    def blocks(self) -> int:
        """The number of blocks to ask for. The last one may be used in part: for a prompt that was stored whole, one
        token is left to compute.
        """
        blocks = min(len(self.tokens) // self.block_tokens, -(-self.most // self.block_tokens))
        return blocks if self.covered(blocks) > self.held else 0

    def covered(self, blocks: int) -> int:
        """Return the tokens in the stack once `blocks` leading blocks are restored."""
        return max(min(blocks * self.block_tokens, self.most), self.held)


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore: `tokens` of the sequence are in the stack now, or on their way, layer by layer, in its
    `coming`; `blocks` of it are stored somewhere.
    """

    tokens: int
    blocks: int = 0
    bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    reason: str = ""


def restore(
    session: Session,
    stack: KVStack,
    wanted: Wanted,
    choice: LoadChoice | None,
    *,
    deadline_s: float,
    beside: bool = False,
) -> Restored:
    """Extend a stack by the stored blocks that are worth loading.

    `deadline_s` is for the first question. `beside`: the copy may go on while the model computes.
    """
    block_bytes = session.fingerprint.payload_bytes()
    prompt = Prompt(wanted.tokens, len(wanted.tokens), wanted.blocks, wanted.held // wanted.block_tokens)
    begin = time.perf_counter()
    with ExitStack() as held:
        leased = held.enter_context(
            lease_by_choice(session, prompt, choice, block_bytes=block_bytes, deadline_s=deadline_s)
        )
        end = wanted.covered(leased.blocks)
        copied_bytes = (end - wanted.held) * block_bytes // wanted.block_tokens
        is_beside = beside and copied_bytes >= stack.copies.least_beside_bytes
        if not _bring(leased, stack, wanted, held, beside=is_beside):
            return Restored(wanted.held, 0, 0, leased.lookup_s, 0.0, ENDED)
    restore_s = time.perf_counter() - begin - leased.lookup_s
    return Restored(end, leased.stored, copied_bytes, leased.lookup_s, restore_s, leased.reason)


def is_silent(restored: Restored) -> bool:
    """Return whether the daemon did not answer in time: asking again soon would take the full deadline again."""
    return restored.reason == REASON_DEADLINE


def _bring(leased: Leased, stack: KVStack, wanted: Wanted, held: ExitStack, *, beside: bool) -> bool:
    """Copy the leased blocks into the stack; return False if the lease did not outlive the copy. A copy beside the
    model takes over the contents of `held`.
    """
    span = Span(wanted.held, wanted.covered(leased.blocks), wanted.block_tokens)
    if span.begin < span.end:
        stack.reserve(len(wanted.tokens), wanted.device)
        assert stack.tensor is not None
        if beside:
            leased.copied(leased.blocks)  # the copy itself is the model's to wait for, if at all
            stack.coming = stack.copies.start(leased.lease, stack.tensor, span, held)
            stack.extend_to(span.end)
            return True
        if not stack.copies.copy(leased.lease, stack.tensor, span):
            return False
        stack.extend_to(span.end)
    leased.copied(leased.blocks)
    return True
