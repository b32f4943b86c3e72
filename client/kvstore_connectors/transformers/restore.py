"""Load the stored prefix of a sequence into its memory, as far as that is faster than computing it.

A miss raises nothing. Invariant: tokens count as restored only if their lease was still valid after they were copied.
With `beside` that is known only at the end: `Copying.finish` returns it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from kvstore_client.paths import costs_file
from kvstore_client.results import REASON_DEADLINE
from kvstore_client.session import Session
from kvstore_connectors.load import Leased, LeasedGroups, PromptToLoad, lease_by_choice, lease_groups_by_choice
from kvstore_connectors.transformers.copies import TokenSpan
from kvstore_connectors.transformers.group_blocks import BlocksToRead
from kvstore_connectors.transformers.group_memory import GroupMemory
from kvstore_connectors.transformers.host_copies import LEAST_BYTES, LayerCopy
from kvstore_connectors.transformers.layers import KVStack
from kvstore_connectors.transformers.storer import Tokens
from kvstore_restore.choice import LoadChoice

ENDED = "the lease ended while its blocks were copied"


_choices: WeakKeyDictionary[PreTrainedModel, LoadChoice] = WeakKeyDictionary()


def choice_of(model: PreTrainedModel, session: Session) -> LoadChoice:
    """Return the `LoadChoice` that decides for `model` how many stored blocks to load, with its record of costs. Each
    model object has its own. A new one begins with the costs that an earlier process saved for the session's
    fingerprint.
    """
    found = _choices.get(model)
    if found is None:
        found = _choices[model] = LoadChoice.load(costs_file(session.fingerprint.digest()))
        session.before_close(found.save)
    return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request to restore a prefix of `tokens` into a cache. The cache holds the first `held` tokens, and may hold at
    most the first `most` tokens afterwards.
    """

    tokens: Tokens
    held: int
    most: int
    block_tokens: int
    device: torch.device

    @property
    def blocks(self) -> int:
        """The number of leading blocks to ask for, or 0 if they would add no token. Only a part of the last block may
        be used: for a prompt that is stored completely, one token is left to compute.
        """
        blocks = min(len(self.tokens) // self.block_tokens, -(-self.most // self.block_tokens))
        return blocks if self.covered(blocks) > self.held else 0

    def covered(self, blocks: int) -> int:
        """Return the number of tokens that the cache holds once the first `blocks` blocks are restored."""
        return max(min(blocks * self.block_tokens, self.most), self.held)


@dataclass(frozen=True, slots=True)
class RestoredCache:
    """The result of a restore. The cache holds the first `tokens` tokens now, or gets them while the model computes.
    `blocks` is the number of stored blocks of the prefix, and `bytes` the number of bytes that were copied. `reason`
    says why no more tokens were restored.
    """

    tokens: int
    blocks: int = 0
    bytes: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    reason: str = ""


def restore(
    session: Session,
    memory: KVStack | GroupMemory,
    wanted: Wanted,
    choice: LoadChoice | None,
    *,
    deadline_s: float,
    beside: bool = False,
) -> RestoredCache:
    """Load stored blocks of the prefix `wanted` into `memory`, and return the result. `choice` decides how many blocks
    are loaded, and the others are computed; if it is None, all are loaded. The lookup takes at most `deadline_s`
    seconds. With `beside` the copy may go on while the model computes.
    """
    if isinstance(memory, GroupMemory):
        return _restore_groups(session, memory, wanted, choice, deadline_s, beside=beside)
    stack = memory
    block_bytes = session.fingerprint.payload_bytes()
    prompt = PromptToLoad(wanted.tokens, len(wanted.tokens), wanted.blocks, wanted.held // wanted.block_tokens)
    begin = time.perf_counter()
    with ExitStack() as held:
        leased = held.enter_context(
            lease_by_choice(session, prompt, choice, block_bytes=block_bytes, deadline_s=deadline_s)
        )
        end = wanted.covered(leased.blocks)
        copied_bytes = (end - wanted.held) * block_bytes // wanted.block_tokens
        is_beside = beside and copied_bytes >= stack.copies.least_beside_bytes
        if not _bring(leased, stack, wanted, held, beside=is_beside):
            return RestoredCache(wanted.held, 0, 0, leased.lookup_s, 0.0, ENDED)
    restore_s = time.perf_counter() - begin - leased.lookup_s
    return RestoredCache(end, leased.stored, copied_bytes, leased.lookup_s, restore_s, leased.reason)


def _restore_groups(
    session: Session,
    memory: GroupMemory,
    wanted: Wanted,
    choice: LoadChoice | None,
    deadline_s: float,
    *,
    beside: bool,
) -> RestoredCache:
    """Set a memory of groups to the longest stored boundary that suits all of them and leaves a token to compute."""
    size = wanted.block_tokens
    prompt = PromptToLoad(wanted.tokens, len(wanted.tokens), wanted.most // size, wanted.held // size)
    begin = time.perf_counter()
    with ExitStack() as held:
        leased = held.enter_context(lease_groups_by_choice(session, prompt, choice, deadline_s=deadline_s))
        end = leased.blocks * size
        if not leased.parts or end <= wanted.held:
            return RestoredCache(wanted.held, leased.stored, 0, leased.lookup_s, 0.0, leased.reason)
        # What is held already would have to be copied behind; another device's copies have streams of their own.
        is_beside = beside and not wanted.held and wanted.device.type == "cpu" and leased.payload_bytes >= LEAST_BYTES
        if not _bring_groups(leased, memory, wanted, held, beside=is_beside):
            leased.copied(0)
            return RestoredCache(wanted.held, 0, 0, leased.lookup_s, 0.0, ENDED)
        leased.copied(leased.blocks)
        nbytes = leased.payload_bytes
    restore_s = time.perf_counter() - begin - leased.lookup_s
    return RestoredCache(end, leased.stored, nbytes, leased.lookup_s, restore_s, leased.reason)


def _bring_groups(leased: LeasedGroups, memory: GroupMemory, wanted: Wanted, held: ExitStack, *, beside: bool) -> bool:
    """Copy the leased blocks into the memory; return False if a lease did not outlive the copy. States are copied at
    once, since the model reads them without asking; a copy of K and V beside the model takes over the contents of
    `held`.
    """
    reads, later = list[BlocksToRead](), list[BlocksToRead]()
    for group, blocks, lease in leased.parts:
        payloads = [lease.payload(block) for block in range(len(blocks))]
        reads.append(BlocksToRead(group, payloads, wanted.block_tokens, wanted.device))
        if beside and group.kind != "recurrent":
            later.append(reads[-1])
        else:
            reads[-1].fill_all()
    if not leased.valid:
        return False
    loaded = {(each.group.group_id, index): rows for each in reads for index, rows in each.rows.items()}
    memory.install(leased.blocks * wanted.block_tokens, wanted.held, loaded)
    if later:

        def copy(layer: int) -> None:
            for each in later:
                if layer in each.rows:
                    each.fill(layer)

        memory.await_copy(LayerCopy(len(memory.layers), copy, leased, held.pop_all()).start())
    return True


def is_silent(restored: RestoredCache) -> bool:
    """Return True if the daemon did not answer this restore in time. The next request would probably wait for its full
    deadline, too.
    """
    return restored.reason == REASON_DEADLINE


def _bring(leased: Leased, stack: KVStack, wanted: Wanted, held: ExitStack, *, beside: bool) -> bool:
    """Copy the leased blocks into the stack; return False if the lease did not outlive the copy. A copy beside the
    model takes over the contents of `held`.
    """
    span = TokenSpan(wanted.held, wanted.covered(leased.blocks), wanted.block_tokens)
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
