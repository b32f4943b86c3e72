"""Who waits and who runs, and who takes whose place.

Owns the two lists and the moves between them: admission in the policy's order, displacement, and making room when
blocks are short. It never computes or samples. Invariants: a sequence runs exactly while it holds blocks; the sequences
of a unit are in the same list.
"""

from collections import Counter
from collections.abc import Callable

from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.scheduling_statistics import SchedulingStatistics
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import BlockSpace
from kvstore_engine.policies import Policy
from kvstore_engine.pool import PoolExhausted

_LOOK_AGAIN_S = 0.25


class RunQueue:
    """The sequences of one engine, at most `places` of them running. `admitted` is told of each that gets blocks."""

    def __init__(
        self,
        space: BlockSpace,
        policy: Policy,
        statistics: SchedulingStatistics,
        preemption: Preemption,
        restorer: Restorer,
        *,
        places: int,
        clock: Callable[[], float],
        admitted: Callable[[Sequence, float], None],
    ) -> None:
        self._space = space
        self._policy = policy
        self._statistics = statistics
        self._preemption = preemption
        self._restorer = restorer
        self._clock = clock
        self._admitted = admitted
        self.places = places
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._look_again_s = 0.0

    def wait(self, sequence: Sequence) -> None:
        """`sequence` waits for admission."""
        sequence.since_s = self._clock()
        self.waiting.append(sequence)
        self._look_again_s = 0.0

    def run(self, sequence: Sequence) -> None:
        """`sequence` has blocks."""
        self.running.append(sequence)
        self._admitted(sequence, self._clock())

    def leave(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """`sequence` has ended: its blocks are let go. Where the K/V in them are not sound, nobody else gets them."""
        if sequence.block_table is not None:
            self._restorer.drop(sequence)
            self.running.remove(sequence)
            if is_sound:
                self._space.release(sequence.block_table)
            else:
                self._space.discard(sequence.block_table)
            sequence.block_table = None
        else:
            self.waiting.remove(sequence)
            self._preemption.forget(sequence)
        self._look_again_s = 0.0

    def admit(self) -> None:
        """Let in whoever's turn it is, as far as places, blocks and the policy's displacements go."""
        now = self._clock()
        # Whom nothing lets in now is let in when somebody leaves, comes, or, by a displacement, has waited on.
        while self.waiting and (now >= self._look_again_s or not self.running):
            head = min(self.waiting, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))
            if not self._let_in(head, now):
                self._look_again_s = now + _LOOK_AGAIN_S
                return

    def make_room(self, sequence: Sequence) -> bool:
        """Preempt the running unit that is to yield first, be it that of `sequence`; False if that runs alone."""
        order = self._yielding_order()
        if len(order) < 2:
            return False
        self._preempt(order[-1])
        return True

    def next_to_yield(self) -> Sequence | None:
        """Whom a shortage of blocks would hit now."""
        order = self._yielding_order()
        return order[-1] if order else None

    def decoding(self) -> list[Sequence]:
        """Running sequences with one token to compute, in whole units, those that yield last first."""
        units = (leader.unit for leader in self._yielding_order())
        return [sequence for unit in units if all(beam.is_decoding for beam in unit) for sequence in unit]

    def prompts(self) -> list[Sequence]:
        """Running sequences with prompts to compute, by whose turn it is."""
        now = self._clock()
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        return sorted(prompts, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))

    def ahead(self, tenant: str) -> int:
        """How many of those that wait go before one more of `tenant`: tenants take turns, so that one with a long queue
        does not keep the others out.
        """
        waiting = Counter([tenant, *(sequence.request.tenant for sequence in self.waiting)])
        return min(len(self.waiting), waiting[tenant] * len(waiting) - 1)

    def of(self, request_id: str) -> list[Sequence]:
        """All answers of a request that are under way; one for each unit."""
        return [sequence for sequence in self.leaders() if sequence.request.id == request_id]

    def leaders(self) -> list[Sequence]:
        """One sequence for each unit."""
        return [sequence for sequence in (*self.waiting, *self.running) if sequence.leads]

    @property
    def free_places(self) -> int:
        """Sequences that may still be let in."""
        return self.places - sum(sequence.places for sequence in self.running if sequence.leads)

    def _yielding_order(self) -> list[Sequence]:
        """One sequence for each unit that runs."""
        now = self._clock()
        leaders = (sequence for sequence in self.running if sequence.leads)
        return sorted(leaders, key=lambda sequence: self._policy.yields(self._statistics.of(sequence), now))

    def _let_in(self, head: Sequence, now: float) -> bool:
        displaceable = self._displaceable(head, now)
        if self.free_places < head.places and not displaceable:
            return False
        while self.free_places < head.places or self._price(head) > self._space.available_blocks:
            missing = self._price(head) - self._space.available_blocks
            if not displaceable or missing > sum(_blocks(sequence) for sequence in displaceable):
                return False
            self._preempt(displaceable.pop())
        try:
            self._preemption.resume(head.unit)
        except PoolExhausted:  # blocks that are kept for the daemon: they come free by themselves
            return False
        level = self._policy.level(self._statistics.of(head), now)
        for sequence in head.unit:
            self.waiting.remove(sequence)
            sequence.level, sequence.since_s = level, now
            self.run(sequence)
        return True

    def _price(self, head: Sequence) -> int:
        """Blocks that must be to be had: its own, and one for each that runs, so that they need not yield at once."""
        return self._preemption.price(head.unit) + (len(self.running) + len(head.unit) if self.running else 0)

    def _displaceable(self, head: Sequence, now: float) -> list[Sequence]:
        """Running units whom that of `head` may displace, the first to yield last."""
        candidate = self._statistics.of(head)
        return [
            sequence
            for sequence in self._yielding_order()
            if self._policy.displaces(candidate, self._statistics.of(sequence), now)
        ]

    def _preempt(self, leader: Sequence) -> None:
        for sequence in leader.unit:
            self._restorer.drop(sequence)
        self._preemption.preempt(leader.unit)
        now = self._clock()
        for sequence in leader.unit:
            self.running.remove(sequence)
            sequence.since_s = now
            self.waiting.append(sequence)


def _blocks(leader: Sequence) -> int:
    """Blocks that the unit holds, at most."""
    return sum(sequence.held.count for sequence in leader.unit)
