"""Brings a prompt's stored prefix into the block pool before prefill.

Owns the order lease what is mapped, decide, lease what must be promoted, copy, release, and the report of it. Most
prefixes lie in DRAM whole: they cost one round trip, and only what slower tiers hold a second one. It never frees or
allocates pool blocks and never computes. Invariants: no byte is read outside a lease; a block counts as restored only
if its lease was still valid *after* it was copied; what is not restored is simply computed, so nothing here can fail a
request.

The tokens of each block are compared with the prompt's by the client (`get` verifies by default), so a
colliding key cannot bring another conversation's state in.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvstore_engine.restore.costs import CostModel
from kvstore_engine.restore.plan import RestorePlan, plan_restore, usable_blocks
from kvstore_engine.restore.session import Bytes, KvLease, KvSession, Tokens

BlockIds = Sequence[int]
_log = logging.getLogger(__name__)
_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.25, 30.0


class BlockReceiver(Protocol):
    """The part of the block pool that takes stored blocks in."""

    @property
    def block_tokens(self) -> int: ...
    def scatter_blocks(self, sources: Sequence[Bytes], tables: Sequence[BlockIds]) -> None: ...


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a request got from the store. `reason` says, for people, why no more than this was restored."""

    tokens: int = 0
    bytes: int = 0
    resident_blocks: int = 0
    lookup_s: float = 0.0
    restore_s: float = 0.0
    estimated_load_s: float = 0.0
    estimated_compute_s: float = 0.0
    reason: str = "no store"


def restore_prefix(
    session: KvSession,
    tokens: Tokens,
    pool: BlockReceiver,
    block_table: BlockIds,
    *,
    block_bytes: int,
    step_tokens: int,
    costs: CostModel,
) -> RestoreReport:
    """Restore the longest worthwhile prefix of `tokens` (int32 [n]) into the pool blocks of `block_table`.

    `block_bytes` is the size of a stored block, `step_tokens` that of a prefill step. `costs` learns from
    what the load really took. `lookup_s` of the report is the first question, `restore_s` the
    rest. On return the K/V of positions [0, report.tokens) is in the pool.
    """
    begin = time.perf_counter()
    usable = usable_blocks(len(tokens), session.block_tokens)
    with session.get(tokens, max_blocks=usable, deadline_s=_LEAST_DEADLINE_S, promote=False) as mapped:
        lookup_s = time.perf_counter() - begin
        plan = plan_restore(
            prompt_tokens=len(tokens),
            resident_blocks=mapped.resident_blocks,
            block_tokens=session.block_tokens,
            block_bytes=block_bytes,
            estimated_load_s=mapped.estimated_load_s,
            step_tokens=step_tokens,
            costs=costs,
        )
        begin = time.perf_counter()
        if not plan.blocks:
            copied = 0
        elif plan.blocks <= len(mapped):
            copied = _copy_in(mapped, pool, block_table, plan.blocks, session.block_tokens)
        else:
            # Waiting longer for a promotion than computing takes would be worse than never having asked.
            deadline_s = min(max(plan.compute_s, _LEAST_DEADLINE_S), _MOST_DEADLINE_S)
            with session.get(tokens, max_blocks=plan.blocks, deadline_s=deadline_s, promote=True) as lease:
                copied = _copy_in(lease, pool, block_table, plan.blocks, session.block_tokens)
        restore_s = time.perf_counter() - begin
    if copied:
        share = copied / mapped.resident_blocks
        costs.observe_load(copied * block_bytes, mapped.estimated_load_s * share, restore_s)
    return RestoreReport(
        tokens=copied * session.block_tokens,
        bytes=copied * block_bytes,
        resident_blocks=mapped.resident_blocks,
        lookup_s=lookup_s,
        restore_s=restore_s,
        estimated_load_s=plan.load_s,
        estimated_compute_s=plan.compute_s,
        reason=_reason(session, plan, copied, str(mapped.reason)),
    )


def _copy_in(lease: KvLease, pool: BlockReceiver, block_table: BlockIds, most: int, block_tokens: int) -> int:
    """Copy up to `most` leased blocks into the pool; how many leading ones can be relied on."""
    per_block = block_tokens // pool.block_tokens
    count = min(len(lease), most)
    if not count:
        return 0
    sources = [lease.payload(index) for index in range(count)]
    tables = [block_table[index * per_block : (index + 1) * per_block] for index in range(count)]
    try:
        pool.scatter_blocks(sources, tables)
    except ValueError as error:  # payloads of another size than this model's blocks have
        _log.warning("stored blocks cannot be used: %s", error)
        return 0
    return count if lease.valid else 0


def _reason(session: KvSession, plan: RestorePlan, copied: int, lookup_reason: str) -> str:
    if session.state != "connected" and not copied:
        return "the store cannot be reached"
    if not plan.blocks:
        return plan.reason if plan.compute_s else lookup_reason or plan.reason
    return plan.reason if copied == plan.blocks else f"{copied} of {plan.blocks} planned blocks could be had"
