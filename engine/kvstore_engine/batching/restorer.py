"""Restores stored prefixes into the pool, for several sequences at a time.

The module owns the stages of each restoration: look up, copy mapped blocks, plan the rest, and load it from its last
block down while ordinary steps compute it from its first one up. Threads wait for the daemon; decisions and copies are
made in the engine's thread, between two steps and in portions, so that running answers go on. If steps wait for layers
(`BlockCopies.waits_by_layer`) and all is mapped, the next step computes behind blocks that are still coming, and
`settle` says whether it counts. One restoration at a time loads from slower tiers, the one with the least left first
(`pointers.turn`). Invariants: a block counts as restored only if its lease was still valid after it was copied
(`Filler`); a sequence's `computed` passes a loaded block only when all before it are present, or on their way beside a
step that `settle` judges; blocks that cannot be loaded are computed.
"""

import logging
from collections.abc import Callable

from kvstore_client.trace import traced
from kvstore_engine.batching.batch import Batch
from kvstore_engine.batching.restoration import Filler, Restoration
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.settings import Restoring
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.restore.copies import PoolCopies
from kvstore_engine.restore.fetcher import ArrivedBlocks, Fetcher
from kvstore_engine.restore.record import RestorationRecord, RestoreReport
from kvstore_engine.restore.session import KvLease
from kvstore_restore.learned import MAPPED, LearnedCosts
from kvstore_restore.plan import RestorePlan
from kvstore_restore.pointers import turn

_log = logging.getLogger(__name__)
_LOOKUP_DEADLINE_S, _STREAM_DEADLINE_S = 0.25, 30.0
_GRACE_S = 0.25  # beyond a lookup's own deadline
_PORTION_BLOCKS = 8  # copied at once, or more if half of the time left is expected to be enough for them
_LEAST_BLOCK_S = 1e-5
_SWITCH_CHUNKS = 8.0  # a stream is left for another request's only where that is so much shorter
_PACE_SHARE, _FIRST_PACE = 0.2, 2.0

Ended = tuple[Sequence, RestoreReport, RestorationRecord]
"""A restoration that has ended, with what it did."""


class Restorer:
    """The part of the engine that restores stored K/V blocks from the daemon into pool blocks of `space`, for several
    sequences at a time. `copies` copies blocks. `costs` estimates which loads save time, and learns from each one.
    `step_tokens` is the most prompt tokens in a step.
    """

    def __init__(
        self,
        space: BlockSpace,
        copies: PoolCopies,
        costs: LearnedCosts,
        *,
        restoring: Restoring,
        step_tokens: int,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._filler = Filler(space, copies)
        self._costs = costs
        self._restoring = restoring
        self._step_tokens = step_tokens
        self._clock = clock
        self.fetcher = Fetcher(clock)
        self._under_way: dict[Sequence, Restoration] = {}
        self._loading: Restoration | None = None  # whose stream is open
        self._decoding_pace = _FIRST_PACE
        self._is_decoding = False

    @property
    def is_busy(self) -> bool:
        """True while the blocks of at least one sequence are being restored."""
        return bool(self._under_way)

    @property
    def is_loading(self) -> bool:
        """True while the daemon loads blocks from a slower tier into memory that this process maps."""
        return self._loading is not None and self._loading.stream is not None and not self._loading.stream.done

    def close(self) -> None:
        """Stop the threads that ask the daemon."""
        self.fetcher.close()

    def begin(self, sequence: Sequence) -> bool:
        """Ask the daemon for the stored blocks of `sequence`, and return True. Return False if no session is connected
        or no block could be restored. Later calls of `advance` continue the restoration and report its end.
        """
        session = sequence.session
        if session is None or session.state != "connected" or self._restoring == "compute":
            return False
        size = session.block_tokens
        usable = (sequence.length - 1) // size  # the last token is computed in any case
        first = sequence.computed // size
        if usable <= first:
            return False
        tokens = sequence.tokens[: usable * size].copy()
        windowed = {} if self._space.windows is None else {"window_tokens": self._space.pool.window_tokens}
        with traced(sequence.request.settings.trace):
            lookup = self.fetcher.request(session, tokens, max_blocks=usable, deadline_s=_LOOKUP_DEADLINE_S, **windowed)
        engine_tokens = self._space.block_tokens
        nodes = sequence.held.nodes[sequence.computed // engine_tokens : usable * size // engine_tokens]
        nodes = [node for node in nodes if not node.ready and node.loader is None]
        for node in nodes:
            node.loader, node.requested = sequence, True
        sequence.is_restoring = True
        self._under_way[sequence] = Restoration(
            chunk_tokens=size,
            chunk_bytes=self._space.pool.payload_bytes(size // engine_tokens),
            learned=self._costs,
            begun_s=self._clock(),
            sequence=sequence,
            session=session,
            tokens=tokens,
            lookup=lookup,
            nodes=nodes,
            begin=first,
        )
        return True

    def drop(self, sequence: Sequence) -> None:
        """Give up the restoration of `sequence`, which has ended or loses its pool blocks. Without a restoration of it,
        nothing happens.
        """
        restoration = self._under_way.get(sequence)
        if restoration is not None:
            self._leave(restoration)
            for node in restoration.nodes:
                node.requested = False  # the answer was not used

    def wait(self, timeout_s: float, *, is_quick: bool = False) -> None:
        """Wait until the daemon has sent an answer or a block, at most `timeout_s` seconds. With `is_quick` it waits
        only if the answer to a lookup is missing, not for blocks that are being loaded.
        """
        under_way = self._under_way.values()
        lookups = [each.lookup for each in under_way if not each.is_answered]
        streams = [] if is_quick else [each.stream for each in under_way if each.stream is not None]
        if lookups or streams:
            self.fetcher.wait([*lookups, *streams], timeout_s)

    def computable(self, sequence: Sequence) -> int:
        """Return the token position up to which the next step may compute `sequence`, which is being restored. If it
        equals `sequence.computed`, the step must leave it out.
        """
        return self._under_way[sequence].computable()

    def settle(self) -> tuple[bool, list[Ended]]:
        """Wait for the blocks that were copied while a step computed; call it before the step's results are used.
        Return two values. The first is False if some of these blocks were lost, so that the step's results must be
        dropped. The second lists the restorations that ended.
        """
        done, is_sound = [], True
        for restoration in [each for each in self._under_way.values() if each.arriving is not None]:
            is_sound &= self._arrived(restoration)
            done.append(self._ended(restoration))
        return is_sound, done

    def stepped(self, batch: Batch, begin_s: float, seconds: float) -> None:
        """Note that the step of `batch` began at `begin_s` and took `seconds` seconds, so that later plans know the
        speed of computing.
        """
        self._is_decoding = bool(batch.decodes)
        prompts = [(part.end - part.begin, part.begin) for part in batch.parts if not part.is_decode]
        alone_s = self._costs.batch_s(prompts)
        if self._is_decoding and alone_s > 0:
            self._decoding_pace += _PACE_SHARE * (max(1.0, seconds / alone_s) - self._decoding_pace)
        for part in batch.parts:
            restoration = self._under_way.get(part.sequence)
            if restoration is not None and restoration.is_meeting:
                restoration.note_step(part.begin, part.end - part.begin, begin_s, begin_s + seconds)

    def advance(self, budget_s: float) -> list[Ended]:
        """Continue all restorations, and copy blocks into the pool for about `budget_s` seconds. Return the
        restorations that ended, each as a sequence, its report and its record.
        """
        done = []
        now = self._clock()
        for restoration in list(self._under_way.values()):
            restoration.now_s = now
            restoration.pace = self._decoding_pace if self._is_decoding else 1.0
            try:
                is_done = self._proceed(restoration, now + budget_s)
            except Exception as error:  # a payload of another size, for instance: the rest of the prompt is computed
                _log.warning("restoring ended early: %s: %s", type(error).__name__, error)
                restoration.failure = f"restoring ended early: {type(error).__name__}: {error}"
                is_done = True
            if is_done:
                done.append(self._ended(restoration))
        self._serve()
        return done

    def _ended(self, restoration: Restoration) -> Ended:
        ended = self._clock()
        self._leave(restoration)
        return restoration.sequence, restoration.report(ended), restoration.record(ended)

    def _leave(self, restoration: Restoration) -> None:
        """Remove a restoration; only blocks that are ready stay."""
        if restoration.arriving is not None:
            self._arrived(restoration)
        self._close(restoration)
        self.fetcher.drop(restoration.lookup)
        sequence = restoration.sequence
        del self._under_way[sequence]
        sequence.is_restoring = False
        for node in restoration.nodes:
            if node.loader is sequence:
                node.loader = None

    def _proceed(self, restoration: Restoration, deadline: float) -> bool:
        """Continue by one stage or portion. Return whether the restoration has ended."""
        if restoration.arriving is not None:  # no step has been computed since
            self._arrived(restoration)
            return True
        if not restoration.is_meeting:
            lookup = restoration.lookup
            if not lookup.done:  # behind other lookups, or a daemon that hangs: computing does not wait for it
                if restoration.now_s > lookup.due_s + _GRACE_S:
                    restoration.failure = "the store did not answer in time"
                return bool(restoration.failure)
            if lookup.failure or lookup.lease is None:
                restoration.failure, restoration.lookup_reason = lookup.failure, lookup.reason
                return True
            if not restoration.is_answered:
                self._answered(restoration, lookup.lease)
                if self._filler.steps_wait and restoration.is_all_mapped:
                    self._filler.begin(restoration, lookup.lease)
                    return False
            if not self._copy_mapped(restoration, lookup.lease, deadline):
                return False
            lookup.release()
            if restoration.next_mapped < restoration.mapped_end or not self._plan_rest(restoration):
                return True
        return self._meet(restoration, deadline)

    def _answered(self, restoration: Restoration, lease: KvLease) -> None:
        """Handle the lookup's answer: copy mapped blocks, unless computing them is quicker."""
        lookup = restoration.lookup
        restoration.is_answered, restoration.resident = True, lease.resident_blocks
        restoration.lookup_reason = str(lease.reason)
        restoration.next_mapped = restoration.begin
        restoration.mapped_end = max(restoration.begin, min(len(lease), lease.resident_blocks))
        if lookup.window is not None:
            restoration.resumes_at = lease.resident_blocks
            if restoration.mapped_end < lease.resident_blocks:  # of no use before all others: they are planned together
                restoration.mapped_end = restoration.begin
        mapped, size = restoration.mapped_end - restoration.begin, restoration.chunk_tokens
        if mapped:
            load_s = self._costs.load_s(MAPPED, mapped * restoration.chunk_bytes)
            ends = restoration.begin * size, restoration.mapped_end * size
            compute_s = self._costs.prefill_s(*ends, self._step_tokens)
            restoration.alone = load_s, compute_s
            if load_s > compute_s and self._restoring != "load":
                restoration.mapped_end = restoration.begin
                restoration.plan = RestorePlan("compute", compute_s, mapped)

    def _copy_mapped(self, restoration: Restoration, lease: KvLease, deadline: float) -> bool:
        """Copy mapped blocks. Return whether the copying has ended, with all of them unless the lease has ended."""
        first, begin = restoration.next_mapped, self._clock()
        now = begin
        block_s = max(self._costs.load_s(MAPPED, restoration.chunk_bytes), _LEAST_BLOCK_S)
        while restoration.next_mapped < restoration.mapped_end:
            portion = max(_PORTION_BLOCKS, int((deadline - now) / 2 / block_s))
            end = min(restoration.next_mapped + portion, restoration.mapped_end)
            if not self._filler.fill(restoration, lease, 0, range(restoration.next_mapped, end)):
                return True
            restoration.next_mapped = end
            if end < restoration.mapped_end and (now := self._clock()) >= deadline:
                break
        nbytes = (restoration.next_mapped - first) * restoration.chunk_bytes
        self._costs.observe_load(MAPPED, nbytes, self._clock() - begin)
        return restoration.next_mapped == restoration.mapped_end

    def _arrived(self, restoration: Restoration) -> bool:
        """Wait for the blocks that come beside a step. Return whether they have come."""
        arriving = restoration.arriving
        assert arriving is not None
        is_whole = self._filler.end(restoration)
        restoration.lookup.release()
        if is_whole and arriving.load.seconds is not None:
            nbytes = len(arriving.portion) * restoration.chunk_bytes
            self._costs.observe_load(MAPPED, nbytes, arriving.load.seconds)
        return is_whole

    def _plan_rest(self, restoration: Restoration) -> bool:
        """Plan the blocks that are not mapped. Return whether some of them shall be loaded."""
        end = min(restoration.resident, len(restoration.lookup.tiers))
        first = restoration.first = restoration.mapped_end
        if restoration.plan is not None or end <= first:
            return False
        tiers = restoration.lookup.tiers[first:end]
        estimate_s = restoration.lookup.estimated_load_s / (end - first)
        for tier in set(tiers):
            self._costs.expect_load(tier, restoration.chunk_bytes, estimate_s)
        restoration.now_s = self._clock()
        restoration.make_plan(tiers, self._restoring, self._step_tokens)
        return restoration.is_meeting

    def _meet(self, restoration: Restoration, deadline: float) -> bool:
        """Take in the computed and the loaded blocks. Return whether all are present."""
        pointers, stream = restoration.pointers, restoration.stream
        restoration.note_computed()
        if stream is not None:
            is_over = stream.done  # before the rest is taken
            for arrival in self.fetcher.take(stream):
                blocks = range(arrival.first, arrival.first + len(arrival.lease))
                # What was mapped when the stream was opened says nothing about its speed.
                tiers = tuple(stream.tiers[block] if block < len(stream.tiers) else MAPPED for block in blocks)
                restoration.note_arrival(arrival.first, tiers, arrival.at_s)
                restoration.taken.append(arrival)
            while restoration.taken and not pointers.is_done:
                if self._copy_arrival(restoration, restoration.taken[0], deadline):
                    del restoration.taken[0]
                if restoration.taken and self._clock() >= deadline:
                    return False
            if is_over:
                self._close(restoration)
                restoration.lose()
        if pointers.is_done:
            self._filler.pass_copied(restoration)  # a step may have brought the last one, before a tail that was loaded
        return pointers.is_done

    def _copy_arrival(self, restoration: Restoration, arrival: ArrivedBlocks, deadline: float) -> bool:
        """Copy blocks that are wanted, until the deadline. Return whether none is left; then its lease has ended."""
        first, lease = arrival.first, arrival.lease
        while arrival.copied < len(lease):
            block = first + arrival.copied
            arrival.copied += 1
            if restoration.is_wanted(block):
                self._filler.fill(restoration, lease, first, range(block, block + 1))
                if arrival.copied < len(lease) and self._clock() >= deadline:
                    return False
        lease.__exit__(None, None, None)
        return True

    def _serve(self) -> None:
        """Let the restoration whose turn it is load."""
        now = self._clock()
        left = {each: len(chunks) for each in self._under_way.values() if (chunks := each.pointers.stored())}
        turns = {each: turn(chunks, now - each.begun_s) for each, chunks in left.items()}
        order = sorted(turns, key=turns.__getitem__)  # ties by arrival
        active = self._loading
        if active in turns and active is not order[0]:
            if turns[active] - turns[order[0]] >= _SWITCH_CHUNKS:
                self._close(active)
            else:
                order.sort(key=lambda each: each is not active)
        ahead_s = 0.0
        for each in order:
            each.ahead_s, ahead_s = ahead_s, ahead_s + each.left_s()
        if self._loading is None and order:
            self._open(order[0], now)

    def _open(self, restoration: Restoration, now: float) -> None:
        end = restoration.first + restoration.pointers.stored()[-1] + 1
        tokens = restoration.tokens[: end * restoration.chunk_tokens]
        with traced(restoration.sequence.request.settings.trace):
            stream = self.fetcher.stream(restoration.session, tokens, max_blocks=end, deadline_s=_STREAM_DEADLINE_S)
        restoration.open(stream, now)
        self._loading = restoration

    def _close(self, restoration: Restoration) -> None:
        """End its stream, if one is open, and learn from it. Blocks that have arrived and were not copied must be
        loaded again.
        """
        stream = restoration.stream
        if stream is None:
            return
        self.fetcher.drop(stream)
        self._loading = None
        restoration.taken.clear()
        restoration.learn_link(None if stream.done else self._clock())
