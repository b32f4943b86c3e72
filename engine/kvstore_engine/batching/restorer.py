"""Restores stored prefixes into the pool, for several sequences at a time.

Owns the stages of each restoration: get a lease on what is mapped, decide, get one on what must be promoted, copy,
release. Threads wait for the daemon; decisions and copies are made in the engine's thread, between two steps and in
portions, so that running answers go on. Invariants: no byte is read outside a lease; blocks count as restored only if
the lease was still valid after they were copied; a block that is ready is never written; what is not restored is
computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import BlockSpace, TrieNode
from kvstore_engine.restore.costs import CostModel
from kvstore_engine.restore.fetcher import Fetch, Fetcher
from kvstore_engine.restore.plan import RestorePlan, plan_restore, usable_blocks
from kvstore_engine.restore.report import RestoreReport
from kvstore_engine.restore.session import KvLease, KvSession, Tokens

_log = logging.getLogger(__name__)
_LEAST_DEADLINE_S, _MOST_DEADLINE_S = 0.25, 30.0
_GRACE_S = 0.25  # beyond a request's own deadline
_PORTION_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Restoration:
    """The restoration of one sequence: storage blocks from `first_block` on, of which `next_block` is copied next."""

    sequence: Sequence
    session: KvSession
    tokens: Tokens
    fetch: Fetch
    nodes: list[TrieNode]
    plan: RestorePlan | None = None
    first_block: int = 0
    next_block: int = 0
    resident_blocks: int = 0
    estimated_load_s: float = 0.0
    lookup_s: float = 0.0
    lookup_reason: str = ""
    copy_s: float = 0.0
    failure: str = ""
    is_promoting: bool = False


class Restorer:
    """Restores into the blocks of `space`. `costs` estimates what pays, and learns from each restoration."""

    def __init__(self, space: BlockSpace, costs: CostModel, *, step_tokens: int, clock: Callable[[], float]) -> None:
        self._space = space
        self._costs = costs
        self._step_tokens = step_tokens
        self._clock = clock
        self.fetcher = Fetcher(clock)
        self._under_way: dict[Sequence, _Restoration] = {}

    @property
    def is_busy(self) -> bool:
        """Some sequence is being restored."""
        return bool(self._under_way)

    def close(self) -> None:
        """Stop the threads."""
        self.fetcher.close()

    def begin(self, sequence: Sequence) -> bool:
        """Request what the daemon has of `sequence`, if that could save anything. `advance` reports the end."""
        session = sequence.session
        if session is None or session.state != "connected":
            return False
        usable = usable_blocks(sequence.length, session.block_tokens)
        first = sequence.computed // session.block_tokens
        if usable <= first:
            return False
        tokens = sequence.tokens[: usable * session.block_tokens].copy()
        fetch = self.fetcher.request(session, tokens, max_blocks=usable, deadline_s=_LEAST_DEADLINE_S, promote=False)
        engine_tokens = self._space.block_tokens
        nodes = sequence.held.nodes[sequence.computed // engine_tokens : usable * session.block_tokens // engine_tokens]
        nodes = [node for node in nodes if not node.ready and node.loader is None]
        for node in nodes:
            node.loader, node.requested = sequence, True
        sequence.is_restoring = True
        self._under_way[sequence] = _Restoration(
            sequence, session, tokens, fetch, nodes, first_block=first, next_block=first
        )
        return True

    def drop(self, sequence: Sequence) -> None:
        """End the restoration of a sequence that loses its blocks or has ended."""
        restoration = self._under_way.pop(sequence, None)
        if restoration is not None:
            self.fetcher.drop(restoration.fetch)
            self._release_nodes(restoration)
            for node in restoration.nodes:
                node.requested = False  # the answer was not used

    def wait(self, timeout_s: float, *, is_quick: bool = False) -> None:
        """Wait until the daemon has answered, or for `timeout_s`. `is_quick`: not for promotions, which take long."""
        under_way = self._under_way.values()
        fetches = [each.fetch for each in under_way if not (is_quick and each.is_promoting)]
        if fetches and not any(fetch.done for fetch in fetches):
            self.fetcher.wait(fetches, timeout_s)

    def advance(self, budget_s: float) -> list[tuple[Sequence, RestoreReport]]:
        """Continue all restorations, copying for about `budget_s`. Returns those that are done, with their reports."""
        done = []
        deadline = self._clock() + budget_s
        for restoration in list(self._under_way.values()):
            if restoration.fetch.done:
                is_done = self._continue(restoration, deadline)
            else:  # behind other promotions, or a daemon that hangs: computing does not wait for it
                is_done = self._clock() > restoration.fetch.due_s + _GRACE_S
                if is_done:
                    restoration.failure = "the store did not answer in time"
            if is_done:
                sequence = restoration.sequence
                del self._under_way[sequence]
                self.fetcher.drop(restoration.fetch)
                self._release_nodes(restoration)
                done.append((sequence, self._report(restoration)))
        return done

    def _release_nodes(self, restoration: _Restoration) -> None:
        restoration.sequence.is_restoring = False
        for node in restoration.nodes:
            if node.loader is restoration.sequence:
                node.loader = None

    def _continue(self, restoration: _Restoration, deadline: float) -> bool:
        try:
            return self._proceed(restoration, deadline)
        except Exception as error:  # a payload of another size, for instance: the rest of the prompt is computed
            _log.warning("restoring ended early: %s: %s", type(error).__name__, error)
            restoration.failure = f"restoring ended early: {type(error).__name__}: {error}"
            return True

    def _proceed(self, restoration: _Restoration, deadline: float) -> bool:
        """Continue by one stage or portion. Returns whether it has ended."""
        lease = restoration.fetch.lease
        if lease is None:
            restoration.failure = restoration.fetch.failure
            return True
        if restoration.plan is None:
            restoration.lookup_s, restoration.lookup_reason = restoration.fetch.seconds, str(lease.reason)
            restoration.plan = self._decide(restoration, lease)
        plan = restoration.plan
        if len(lease) < plan.blocks and not restoration.is_promoting:
            restoration.is_promoting = True
            restoration.fetch.release()
            # Waiting longer for a promotion than computing takes would be worse than not requesting it.
            deadline_s = min(max(plan.compute_s, _LEAST_DEADLINE_S), _MOST_DEADLINE_S)
            restoration.fetch = self.fetcher.request(
                restoration.session, restoration.tokens, max_blocks=plan.blocks, deadline_s=deadline_s, promote=True
            )
            return False
        most = min(plan.blocks, len(lease))
        while restoration.next_block < most:
            portion = range(restoration.next_block, min(restoration.next_block + _PORTION_BLOCKS, most))
            if not self._copy(restoration, lease, portion):
                break
            if restoration.next_block < most and self._clock() >= deadline:
                return False
        self._learn(restoration)
        return True

    def _decide(self, restoration: _Restoration, lease: KvLease) -> RestorePlan:
        sequence, session = restoration.sequence, restoration.session
        restoration.resident_blocks = lease.resident_blocks
        restoration.estimated_load_s = lease.estimated_load_s
        return plan_restore(
            prompt_tokens=sequence.length,
            resident_blocks=lease.resident_blocks,
            block_tokens=session.block_tokens,
            block_bytes=self._block_bytes(session),
            estimated_load_s=lease.estimated_load_s,
            step_tokens=self._step_tokens,
            costs=self._costs,
            present_tokens=sequence.computed,
        )

    def _copy(self, restoration: _Restoration, lease: KvLease, portion: range) -> bool:
        """Copy some storage blocks. Returns whether the lease was valid throughout."""
        begin = self._clock()
        sequence, pool = restoration.sequence, self._space.pool
        size, blocks = restoration.session.block_tokens, sequence.held.blocks
        per_block = size // self._space.block_tokens
        whole_sources, whole_tables = [], []
        for index in portion:
            table = blocks[index * per_block : (index + 1) * per_block]
            nodes = sequence.held.nodes[index * per_block : (index + 1) * per_block]
            present = sum(node.ready for node in nodes)  # leading ones, which other sequences may have filled meanwhile
            present = max(present, min(per_block, sequence.computed // self._space.block_tokens - index * per_block))
            if present <= 0:
                whole_sources.append(lease.payload(index))
                whole_tables.append(table)
            elif present < per_block:
                pool.scatter_part(np.asarray(lease.payload(index)), present, table[present:])
        pool.scatter_blocks(whole_sources, whole_tables)
        restoration.copy_s += self._clock() - begin
        if not lease.valid:
            return False
        begin_token, end = sequence.computed, (portion.stop) * size
        sequence.advance_to(max(end, begin_token), "daemon")
        self._space.seal(sequence.held, sequence.tokens, begin_token, sequence.computed)
        for index in portion:
            last = (index + 1) * per_block - 1
            if last < len(sequence.held.nodes):
                sequence.held.nodes[last].stored = True
        restoration.next_block = portion.stop
        return True

    def _learn(self, restoration: _Restoration) -> None:
        copied = restoration.next_block - restoration.first_block
        if copied and restoration.resident_blocks:
            share = copied / restoration.resident_blocks
            nbytes = copied * self._block_bytes(restoration.session)
            self._costs.observe_load(nbytes, restoration.estimated_load_s * share, _restore_s(restoration))

    def _block_bytes(self, session: KvSession) -> int:
        return self._space.pool.payload_bytes(session.block_tokens // self._space.block_tokens)

    def _report(self, restoration: _Restoration) -> RestoreReport:
        copied, plan = restoration.next_block - restoration.first_block, restoration.plan
        return RestoreReport(
            tokens=copied * restoration.session.block_tokens,
            bytes=copied * self._block_bytes(restoration.session),
            resident_blocks=restoration.resident_blocks,
            lookup_s=restoration.lookup_s,
            restore_s=_restore_s(restoration),
            estimated_load_s=plan.load_s if plan is not None else 0.0,
            estimated_compute_s=plan.compute_s if plan is not None else 0.0,
            reason=_reason(restoration, copied),
        )


def _restore_s(restoration: _Restoration) -> float:
    return restoration.copy_s + (restoration.fetch.seconds if restoration.is_promoting else 0.0)


def _reason(restoration: _Restoration, copied: int) -> str:
    plan = restoration.plan
    if restoration.failure or plan is None:
        return restoration.failure
    if restoration.session.state != "connected" and not copied:
        return "the store cannot be reached"
    if not plan.blocks:
        return plan.reason if plan.compute_s else restoration.lookup_reason or plan.reason
    planned = plan.blocks - restoration.first_block
    return plan.reason if copied == planned else f"{copied} of {planned} planned blocks could be restored"
