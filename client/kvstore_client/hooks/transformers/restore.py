"""Brings the stored prefix of a sequence into a stack of layers, as far as that is faster than computing it.

Never raises for a miss. Invariant: tokens count as restored only if their lease was still valid after they were copied.
With `beside` that is known only at the end: `LayerCopy.finish` says it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvstore_client.hooks.load import Leased, Prompt, lease_by_choice
from kvstore_client.hooks.transformers.layers import KVStack
from kvstore_client.hooks.transformers.layerwise import LEAST_BYTES, LayerCopy
from kvstore_client.hooks.transformers.storer import Tokens
from kvstore_client.restore.choice import LoadChoice
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.session import Session

ENDED = "the lease ended while its blocks were copied"


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
    """`tokens` of the sequence are in the stack now, or on their way, layer by layer, in its `coming`; `blocks` of it
    are stored somewhere."""

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
    """Extend a stack by what is stored and worth loading.

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
        if beside and copied_bytes >= LEAST_BYTES:
            stack.coming = _copy_beside(leased, stack, wanted, held.pop_all())
        elif not _copy(leased, stack, wanted):
            return Restored(wanted.held, 0, 0, leased.lookup_s, 0.0, ENDED)
    restore_s = time.perf_counter() - begin - leased.lookup_s
    return Restored(end, leased.stored, copied_bytes, leased.lookup_s, restore_s, leased.reason)


def is_silent(restored: Restored) -> bool:
    """Whether the daemon did not answer in time: asking again soon would cost as much."""
    return restored.reason == REASON_DEADLINE


def _payloads(leased: Leased, stack: KVStack, wanted: Wanted) -> Sequence[npt.NDArray[np.uint8]]:
    stack.reserve(len(wanted.tokens), wanted.device)
    return [leased.lease.payload(block) for block in range(wanted.held // wanted.block_tokens, leased.blocks)]


def _copy(leased: Leased, stack: KVStack, wanted: Wanted) -> bool:
    """False if the lease did not outlive the copy."""
    end = wanted.covered(leased.blocks)
    if end > wanted.held:
        stack.scatter(_payloads(leased, stack, wanted), wanted.block_tokens, wanted.held, end)
        if not leased.lease.valid:
            return False
        stack.extend_to(end)
    leased.copied(leased.blocks)
    return True


def _copy_beside(leased: Leased, stack: KVStack, wanted: Wanted, held: ExitStack) -> LayerCopy:
    end = wanted.covered(leased.blocks)
    payloads = _payloads(leased, stack, wanted)
    leased.copied(leased.blocks)  # the copy itself is the model's to wait for, if at all

    def copy(layer: int) -> None:
        stack.scatter(payloads, wanted.block_tokens, wanted.held, end, slice(layer, layer + 1))

    copying = LayerCopy(stack.shape.layers, copy, leased.lease, held).start()
    stack.extend_to(end)
    return copying
