"""Brings stored prefixes into the pool for several sequences at a time.

Owns each restoring sequence's way: ask what is mapped, decide, ask for what must be promoted, copy, release. Questions
wait in threads; decisions and copies are made here, in the engine's thread, between two steps and in portions, so that
running answers go on. Invariants: no byte is read outside a lease; blocks count as restored only if the lease was still
valid after they were copied; a block that is ready is never written; what is not restored is simply computed.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

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
_GRACE_S = 0.25  # on top of a question's own deadline
_PORTION_BLOCKS = 8


@dataclass(slots=True, eq=False)
class _Restoration:
    """One sequence's way. `next_block` is the storage block to copy next, `first_block` where it began."""

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
    is_promoting: bool = field(default=False)


class Restorer:
    """Restores into the blocks of `space`. `costs` decides and learns."""

    def __init__(
        self, space: BlockSpace, costs: CostModel, *, step_tokens: int, clock: Callable[[], float], fetcher: Fetcher
    ) -> None:
        self._space = space
        self._costs = costs
        self._step_tokens = step_tokens
        self._clock = clock
        self._fetcher = fetcher
        self._under_way: dict[Sequence, _Restoration] = {}

    @property
    def is_busy(self) -> bool:
        """Some sequence is restoring."""
        return bool(self._under_way)

    def begin(self, sequence: Sequence) -> bool:
        """Ask for what the daemon has of `sequence`, if that could save anything; `advance` says when it is through."""
        session = sequence.session
        if session is None or session.state != "connected":
            return False
        usable = usable_blocks(sequence.length, session.block_tokens)
        first = sequence.computed // session.block_tokens
        if usable <= first:
            return False
        tokens = sequence.tokens[: usable * session.block_tokens].copy()
        fetch = self._fetcher.ask(session, tokens, max_blocks=usable, deadline_s=_LEAST_DEADLINE_S, promote=False)
        engine_tokens = self._space.block_tokens
        nodes = sequence.held.nodes[sequence.computed // engine_tokens : usable * session.block_tokens // engine_tokens]
        nodes = [node for node in nodes if not node.ready and node.loader is None]
        for node in nodes:
            node.loader, node.asked = sequence, True
        sequence.is_restoring = True
        self._under_way[sequence] = _Restoration(
            sequence, session, tokens, fetch, nodes, first_block=first, next_block=first
        )
        return True

    def drop(self, sequence: Sequence) -> None:
        """The sequence loses its blocks, or has ended."""
        restoration = self._under_way.pop(sequence, None)
        if restoration is not None:
            self._fetcher.drop(restoration.fetch)
            self._let_go(restoration)
            for node in restoration.nodes:
                node.asked = False  # nobody has heard the answer

    def wait(self, timeout_s: float, *, is_quick: bool = False) -> None:
        """Until an answer has come, or `timeout_s` have passed. `is_quick`: for no promotion, which takes its time."""
        under_way = self._under_way.values()
        fetches = [each.fetch for each in under_way if not (is_quick and each.is_promoting)]
        if fetches and not any(fetch.done for fetch in fetches):
            self._fetcher.wait(fetches, timeout_s)

    def advance(self, budget_s: float) -> list[tuple[Sequence, RestoreReport]]:
        """Go on with all that can, copying for about `budget_s`; the sequences that are through, with what they got."""
        through = []
        deadline = self._clock() + budget_s
        for restoration in list(self._under_way.values()):
            if restoration.fetch.done:
                is_through = self._is_through(restoration, deadline)
            else:  # behind others' promotions, or a daemon that hangs: computing is not put off for it
                is_through = self._clock() > restoration.fetch.due_s + _GRACE_S
                if is_through:
                    restoration.failure = "the store did not answer in time"
            if is_through:
                sequence = restoration.sequence
                del self._under_way[sequence]
                self._fetcher.drop(restoration.fetch)
                self._let_go(restoration)
                through.append((sequence, self._report(restoration)))
        return through

    def _let_go(self, restoration: _Restoration) -> None:
        restoration.sequence.is_restoring = False
        for node in restoration.nodes:
            if node.loader is restoration.sequence:
                node.loader = None

    def _is_through(self, restoration: _Restoration, deadline: float) -> bool:
        try:
            return self._proceed(restoration, deadline)
        except Exception as error:  # a payload of another size, say: the prompt is computed from here on
            _log.warning("restoring ended early: %s: %s", type(error).__name__, error)
            restoration.failure = f"restoring ended early: {type(error).__name__}: {error}"
            return True

    def _proceed(self, restoration: _Restoration, deadline: float) -> bool:
        """One more part of the way; whether it has ended."""
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
            # Waiting longer for a promotion than computing takes would be worse than never having asked.
            deadline_s = min(max(plan.compute_s, _LEAST_DEADLINE_S), _MOST_DEADLINE_S)
            restoration.fetch = self._fetcher.ask(
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
        """Copy some storage blocks; whether they can be relied on."""
        begin = self._clock()
        sequence, pool = restoration.sequence, self._space.pool
        size, blocks = restoration.session.block_tokens, sequence.held.blocks
        per_block = size // self._space.block_tokens
        whole_sources, whole_tables = [], []
        for index in portion:
            table = blocks[index * per_block : (index + 1) * per_block]
            nodes = sequence.held.nodes[index * per_block : (index + 1) * per_block]
            present = sum(node.ready for node in nodes)  # leading ones: others may have put them in meanwhile
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
        sequence.reach(max(end, begin_token), "daemon")
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
    return plan.reason if copied == planned else f"{copied} of {planned} planned blocks could be had"
