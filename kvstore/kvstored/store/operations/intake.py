"""The blocks of one put on their way: which have begun, in which parts, and which can begin together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import eq

from kvstore_proto.identity import NO_EXTRA, NO_PARENT, chain
from kvstore_proto.terms import Terms
from kvstore_tiers.base import Outcome
from kvstore_tiers.host_transfers import ImageRun
from kvstored.store.blocks.keys import TenantIndex
from kvstored.store.operations.client import Client
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import NO_EXTRA_FIELD, NOWHERE, Offer


@dataclass(slots=True)
class Part:
    """A piece of a put whose blocks are copied together, by the host tier's threads; blocks are named by their numbers
    in the intake. `begun` has the blocks that have begun, and `tokens` names their rows. `copying` has the blocks that
    are copied, `images` their images, `copied` their outcomes. The tokens of the blocks `false` do not hash to the key.
    """

    begun: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    copying: list[int] = field(default_factory=list)
    false: set[int] = field(default_factory=set)
    images: ImageRun = field(default_factory=ImageRun)
    copied: asyncio.Future[Sequence[Outcome]] | None = None
    kept: int = 0  # what the headers say of how long


class Intake:
    """The blocks of `offer` at `positions`, which one put must store, in columns. The first `begun` blocks have begun,
    in `parts`. `statuses` are by position in the offer, `terms` for new blocks.
    """

    def __init__(
        self,
        client: Client,
        mode: DurabilityMode,
        offer: Offer,
        positions: Sequence[int],
        statuses: bytearray,
        terms: Terms,
    ) -> None:
        self.client, self.mode, self.offer, self.positions = client, mode, offer, positions
        self.statuses, self.terms = statuses, terms
        columns = (offer.keys, offer.parents, offer.extras, offer.payload_bytes, offer.offsets)
        if len(positions) < len(offer.keys):
            columns = tuple([column[at] for at in positions] for column in columns)  # type: ignore[assignment]
        self.keys, self.parents, self.extras, self.payload_bytes, self.offsets = columns
        self.begun = 0
        self.parts: list[Part] = []

    def __len__(self) -> int:
        return len(self.positions)

    def chains(self) -> list[range]:
        """Return the blocks in runs that continue one another."""
        parents, keys = self.parents, self.keys
        ends = [at for at in range(1, len(self)) if parents[at] != keys[at - 1]]
        return [range(first, end) for first, end in zip([0, *ends], [*ends, len(self)], strict=True) if first < end]

    def run_from(self, index: TenantIndex, end: int) -> range:
        """Return the blocks from the next one to `end` that can begin together: they are of one size, continue one
        another, and have no row in `index`, the tenant's."""
        first, keys, parents, sizes = self.begun, self.keys, self.parents, self.payload_bytes
        may_have_row = not index.has_none_of(keys[first + 1 : end])
        follow = parents[first + 1 : end] == keys[first : end - 1] and parents[first] not in keys[first + 1 : end]
        if follow and not may_have_row and sizes[first:end].count(sizes[first]) == end - first:
            return range(first, end)
        for at in range(first + 1, end):
            # The parent of the first may get a row meanwhile.
            is_next = parents[at] == keys[at - 1] and sizes[at] == sizes[first]
            if not is_next or keys[at] == parents[first] or (may_have_row and index.row(keys[at]) >= 0):
                return range(first, at)
        return range(first, end)

    def false_blocks(self, run: range, tokens: Sequence[bytes]) -> list[int]:
        """Return the blocks of `run` whose packed token ids in `tokens`, after the block's parent, do not hash to the
        block's key. The key of a block without tokens cannot be checked, and counts as right.
        """
        group, fingerprint, found = self.offer.group, self.client.fingerprint, list[int]()
        size, step, hash_name = fingerprint.block_tokens * 4, fingerprint.engine_block_tokens, fingerprint.key_hash
        keys, parents, extras = self.keys, self.parents, self.extras
        for at, ids in zip(run, tokens, strict=True):
            if not ids:
                continue
            parent = self.client.roots[group] if parents[at] == NO_PARENT else parents[at]
            extra = NO_EXTRA if extras[at] == NO_EXTRA_FIELD else extras[at]
            if len(ids) != size or keys[at] != chain(
                parent, ids, engine_block_tokens=step, extra=extra, hash_name=hash_name
            ):
                found.append(at)
        return found


def leading_chain(offer: Offer) -> Sequence[bytes]:
    """Return the keys of the offer's first chain; as a rule it has no other."""
    keys, parents = offer.keys, offer.parents
    if list(parents[1:]) == list(keys[:-1]):
        return keys
    return keys[: next(at for at in range(1, len(keys)) if parents[at] != keys[at - 1])]


def is_new_throughout(offer: Offer, rows: Sequence[int]) -> bool:
    """Return whether each block of `offer` was written, is there once, has no row in `rows`, and is neither the root
    nor its own parent."""
    is_written = rows.count(-1) == len(rows) == len(set(offer.keys)) and NOWHERE not in offer.offsets
    return is_written and NO_PARENT not in offer.keys and not any(map(eq, offer.keys, offer.parents))
