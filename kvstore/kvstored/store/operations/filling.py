"""Filling: from a slot with an unreadable row to a block that everybody finds, or to nothing.

Owns the copies of blocks that have begun, their publication, and taking them back. The client can write its staging
memory at any time, so nothing in it is trusted: the daemon copies first and checks the copy, takes every header field
but the token ids from the request, and refuses tokens that do not hash to the key.
Never chooses slots or blocks. Invariant: a slot that is being copied into is neither published nor freed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore_proto.arena import BlockHeader
from kvstore_tiers.base import Outcome, OutcomeKind, Slot
from kvstore_tiers.host import HostTier
from kvstore_tiers.segments import Segment
from kvstored.clock import Clock
from kvstored.completions import CompletionQueue
from kvstored.lifecycle import CopyState
from kvstored.store.blocks import Residency
from kvstored.store.operations.client import Client
from kvstored.store.operations.offer import StagedBlock, StoreStatus
from kvstored.store.operations.token_check import tokens_hash_to_key
from kvstored.store.tiering import MAPPED
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Filling:
    """One block between its slot and its publication."""

    position: int
    block: StagedBlock
    token: int  # of the residency row
    slot: Slot
    depth: int
    outcome: Outcome | None = None


@dataclass(slots=True)
class Part:
    """Blocks that are copied together. `copied` has the outcomes of `copying`; none when the copies could not begin."""

    fillings: list[Filling] = field(default_factory=list)
    copying: list[Filling] = field(default_factory=list)
    copied: asyncio.Future[Sequence[Outcome]] | None = None

    async def copies_ended(self) -> None:
        """Wait for the copies, and know what became of them."""
        if self.copied is not None:
            for filling, outcome in zip(self.copying, await self.copied, strict=True):
                filling.outcome = outcome


class Filler:
    """See the module."""

    def __init__(
        self, residency: Residency, host: HostTier, completions: CompletionQueue, clock: Clock, counters: Counters
    ) -> None:
        self._residency = residency
        self._host = host
        self._completions = completions
        self._clock = clock
        self._counters = counters

    def start_copies(self, client: Client, part: Part) -> None:
        """Copy payloads from staging to arenas in the tier's threads, which goes on when this returns."""
        writes: list[tuple[Slot, BlockHeader, list[Segment]]] = []
        created_ns = self._clock.wall_ns()
        for filling in part.fillings:
            block = filling.block
            tokens = block.staged.tokens_at(block.offset)
            if not tokens_hash_to_key(client, block, tokens):
                filling.outcome = Outcome(OutcomeKind.CORRUPT, message="tokens do not hash to the key")
                continue
            header = BlockHeader(
                key=block.key, parent=block.parent, extra=block.extra,
                fingerprint=client.fingerprint_digest, tenant=client.tenant.digest, group=block.group,
                payload_bytes=block.payload_bytes, tokens=tokens, depth=filling.depth,
                generation=filling.slot.generation, created_ns=created_ns,
            )  # fmt: skip
            part.copying.append(filling)
            writes.append((filling.slot, header, [block.staged.payload_at(block.offset, block.payload_bytes)]))
        if writes:
            part.copied = asyncio.get_running_loop().create_future()
            ended = self._completions.to_loop(part.copied.set_result)
            try:
                self._host.write_many(writes, ended)
            except Exception:  # nothing is being copied
                ended(())
                raise

    def publish(self, part: Part, statuses: bytearray) -> dict[int, int]:
        """Make whole blocks readable, in chain order, once their copies have ended; position -> row of each."""
        residency = self._residency
        now_ns = self._clock.monotonic_ns()
        published: dict[int, int] = {}
        stored_bytes = 0
        for filling in part.fillings:
            row = residency.current(filling.token)
            outcome = filling.outcome
            assert row >= 0 and outcome is not None, "a block went away while it was being filled"
            if not outcome.ok:
                self._host.free(residency.detach(row, MAPPED))
                if outcome.kind is OutcomeKind.CORRUPT:
                    statuses[filling.position] = StoreStatus.KEY_MISMATCH
                else:
                    log.warning("a block could not be stored: %s", outcome.message)
                continue
            residency.publish(row, MAPPED, now_ns)
            statuses[filling.position] = StoreStatus.STORED
            published[filling.position] = row
            stored_bytes += filling.block.payload_bytes
        if published:
            self._counters.add("stored_blocks", len(published))
            self._counters.add("stored_bytes", stored_bytes)
            residency.touch_run(list(published.values()), now_ns)
        return published

    async def undo(self, parts: Sequence[Part]) -> None:
        """Take back what is not published, as if it had never begun, once nothing copies into it."""
        for part in parts:
            if part.copied is not None:
                await part.copied
        for part in parts:
            for filling in part.fillings:
                row = self._residency.current(filling.token)
                if row >= 0 and self._residency.state(row, MAPPED) is CopyState.FILLING:
                    self._host.free(self._residency.detach(row, MAPPED))
