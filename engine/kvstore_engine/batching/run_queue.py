"""The sequences that wait and those that run.

Owns the two lists and the moves between them: admission in the policy's order, displacement, and making room when
blocks are short. It never computes or samples. Invariants: a sequence runs exactly while it holds blocks; all sequences
of a unit are in the same list.
"""

from collections import Counter
from collections.abc import Callable

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.scheduling_statistics import SchedulingStatistics
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks import BlockSpace
from kvstore_engine.policies import Policy
from kvstore_engine.pool import PoolExhausted

_LOOK_AGAIN_S = 0.25
_BLOCKS_A_STEP = 2  # that a decoding sequence takes at most: a new one, a copy of a shared one


class RunQueue:
    """The sequences of one engine; at most `places` of them run."""

    def __init__(
        self,
        space: BlockSpace,
        policy: Policy,
        statistics: SchedulingStatistics,
        preemption: Preemption,
        restorer: Restorer,
        *,
        places: int,
        observer: Observer,
        clock: Callable[[], float],
    ) -> None:
        self._space = space
        self._policy = policy
        self._statistics = statistics
        self._preemption = preemption
        self._restorer = restorer
        self._observer = observer
        self._clock = clock
        self.places = places
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._look_again_s = 0.0

    @property
    def has_sequences(self) -> bool:
        """Some sequence waits or runs."""
        return bool(self.waiting or self.running)

    def enter(self, sequence: Sequence) -> None:
        """A unit with `sequence` is new: call `wait` or `run` next."""
        self._statistics.tenants.enter(sequence.request.tenant)

    def wait(self, sequence: Sequence) -> None:
        """`sequence` waits for admission."""
        sequence.since_s = self._clock()
        self.waiting.append(sequence)
        self._look_again_s = 0.0

    def run(self, sequence: Sequence) -> None:
        """`sequence` has got its blocks."""
        now = self._clock()
        self.running.append(sequence)
        if sequence.accounts.admitted_s is None:
            sequence.accounts.admitted_s = now
        self._observer.admitted(sequence.request.id, sequence.index, now)

    def leave(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """`sequence` has ended: release its blocks. Unless `is_sound`, their K/V are not shared any longer."""
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
        if sequence.leads:
            self._statistics.tenants.leave(sequence.request.tenant)
        self._look_again_s = 0.0

    def admit(self) -> None:
        """Admit sequences in the policy's order, as far as places, blocks and displacements allow."""
        now = self._clock()
        # A sequence that cannot be admitted now can be once another ends or arrives, or, by displacement, after a
        # while.
        while self.waiting and (now >= self._look_again_s or not self.running):
            head = min(self.waiting, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))
            if not self._admit(head, now):
                self._look_again_s = now + _LOOK_AGAIN_S
                return

    def make_room(self, sequence: Sequence) -> bool:
        """Preempt the running unit that yields first, perhaps that of `sequence`. False if that one runs alone."""
        order = self._yielding_order()
        if len(order) < 2:
            return False
        self._preempt(order[-1])
        return True

    def next_to_yield(self) -> Sequence | None:
        """The leader of the unit that a shortage of blocks would preempt now."""
        order = self._yielding_order()
        return order[-1] if order else None

    def decoding(self) -> list[Sequence]:
        """Running sequences with one token to compute, in whole units; where blocks may be short, those that yield last
        come first."""
        is_short = self._space.available_blocks < _BLOCKS_A_STEP * len(self.running)
        units = (leader.unit for leader in (self._yielding_order() if is_short else self._leaders()))
        return [sequence for unit in units if all(beam.is_decoding for beam in unit) for sequence in unit]

    def prompts(self) -> list[Sequence]:
        """Running sequences with prompt tokens to compute, in the order in which they are served."""
        now = self._clock()
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        return sorted(prompts, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))

    def ahead(self, tenant: str) -> int:
        """How many waiting sequences go before one more of `tenant`. Tenants take turns, so that one with a long queue
        does not keep the others out.
        """
        waiting = Counter([tenant, *(sequence.request.tenant for sequence in self.waiting)])
        return min(len(self.waiting), waiting[tenant] * len(waiting) - 1)

    def of(self, request_id: str) -> list[Sequence]:
        """The unfinished answers of a request, one leader for each unit."""
        return [sequence for sequence in self.leaders() if sequence.request.id == request_id]

    def leaders(self) -> list[Sequence]:
        """One sequence for each unit."""
        return [sequence for sequence in (*self.waiting, *self.running) if sequence.leads]

    @property
    def free_places(self) -> int:
        """Sequences that may still be admitted."""
        return self.places - sum(sequence.places for sequence in self.running if sequence.leads)

    def _leaders(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.leads]

    def _yielding_order(self) -> list[Sequence]:
        """The leaders of the running units; the last one yields first."""
        now = self._clock()
        return sorted(self._leaders(), key=lambda sequence: self._policy.yields(self._statistics.of(sequence), now))

    def _admit(self, head: Sequence, now: float) -> bool:
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
        except PoolExhausted:  # puts pin blocks until the daemon has them
            return False
        level = self._policy.level(self._statistics.of(head), now)
        for sequence in head.unit:
            self.waiting.remove(sequence)
            sequence.level, sequence.since_s = level, now
            self.run(sequence)
        return True

    def _price(self, head: Sequence) -> int:
        """Blocks that must be available: its own, and one for each running sequence, lest one must yield at once."""
        return self._preemption.price(head.unit) + (len(self.running) + len(head.unit) if self.running else 0)

    def _displaceable(self, head: Sequence, now: float) -> list[Sequence]:
        """Running units that `head` may displace; the last one yields first."""
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
    """Blocks that the unit holds, shared ones counted for each of its sequences."""
    return sum(sequence.held.count for sequence in leader.unit)
