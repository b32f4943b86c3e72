"""The waiting and the running sequences.

The module owns the two lists and the moves between them: admission in the policy's order, displacement, and making room
when blocks are short. It does not compute or sample. Invariant: a sequence runs exactly while it holds blocks.
"""

from collections import Counter
from collections.abc import Callable

from kvstore_engine.batching.observer import Observer
from kvstore_engine.batching.policies import SchedulingPolicy
from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restorer import Restorer
from kvstore_engine.batching.scheduling_statistics import SchedulingStatistics
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.blocks.space import BlockSpace
from kvstore_engine.pool import PoolExhausted

_LOOK_AGAIN_S = 0.25
_BLOCKS_A_STEP = 2  # that a decoding sequence takes at most: a new one, a copy of a shared one


class RunQueue:
    """The lists of the sequences that wait and that run; at most `places` run at once. In the order of `policy`, it
    lets waiting sequences run, and takes the blocks of running ones when blocks are short.
    """

    def __init__(
        self,
        space: BlockSpace,
        policy: SchedulingPolicy,
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
        """True if at least one sequence waits or runs."""
        return bool(self.waiting or self.running)

    def enter(self, sequence: Sequence) -> None:
        """Add the new `sequence` to the count of its tenant's sequences. The caller calls `wait` or `run` next."""
        self._statistics.tenants.enter(sequence.request.tenant)

    def wait(self, sequence: Sequence) -> None:
        """Put `sequence` into the list of the sequences that wait to be admitted."""
        sequence.since_s = self._clock()
        self.waiting.append(sequence)
        self._look_again_s = 0.0

    def run(self, sequence: Sequence) -> None:
        """Put `sequence`, which has got its blocks, into the list of the sequences that run."""
        now = self._clock()
        self.running.append(sequence)
        if sequence.accounts.admitted_s is None:
            sequence.accounts.admitted_s = now
        self._observer.admitted(sequence.request.id, sequence.index, now)

    def leave(self, sequence: Sequence, *, is_sound: bool = True) -> None:
        """Remove `sequence`, which has ended, and release its blocks. With `is_sound` False, its computed blocks are no
        longer shared with later sequences.
        """
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
        self._statistics.tenants.leave(sequence.request.tenant)
        self._look_again_s = 0.0

    def admit(self) -> None:
        """Let waiting sequences run, in the policy's order, while a place and enough pool blocks are free. Running
        sequences may lose theirs to a waiting one, if the policy says so.
        """
        now = self._clock()
        # A sequence that cannot be admitted now can be once another ends or arrives, or, by displacement, after a
        # while.
        while self.waiting and (now >= self._look_again_s or not self.running):
            head = min(self.waiting, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))
            if not self._admit(head, now):
                self._look_again_s = now + _LOOK_AGAIN_S
                return

    def make_room(self, sequence: Sequence) -> bool:
        """Take the pool blocks of the running sequence that the policy gives up first, perhaps of `sequence` itself.
        Return False, with nothing changed, if only one sequence runs.
        """
        order = self._yielding_order()
        if len(order) < 2:
            return False
        self._preempt(order[-1])
        return True

    def next_to_yield(self) -> Sequence | None:
        """Return the running sequence that loses its pool blocks first when blocks are short, or None if none runs."""
        order = self._yielding_order()
        return order[-1] if order else None

    def decoding(self) -> list[Sequence]:
        """Return the running sequences whose next step computes one token of an answer. If pool blocks are short, the
        sequence that is the last to lose its blocks comes first.
        """
        is_short = self._space.available_blocks < _BLOCKS_A_STEP * len(self.running)
        return [each for each in (self._yielding_order() if is_short else self.running) if each.is_decoding]

    def prompts(self) -> list[Sequence]:
        """Return the running sequences that have prompt tokens to compute, in the order in which they are served."""
        now = self._clock()
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        return sorted(prompts, key=lambda sequence: self._policy.turn(self._statistics.of(sequence), now))

    def ahead(self, tenant: str) -> int:
        """Return how many of the waiting sequences would be served before a further one of `tenant`, if the tenants
        take turns.
        """
        waiting = Counter([tenant, *(sequence.request.tenant for sequence in self.waiting)])
        return min(len(self.waiting), waiting[tenant] * len(waiting) - 1)

    def of(self, request_id: str) -> list[Sequence]:
        """Return the sequences of the request `request_id` that have not ended."""
        return [sequence for sequence in self.sequences if sequence.request.id == request_id]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that wait or run, the waiting ones first."""
        return [*self.waiting, *self.running]

    @property
    def free_places(self) -> int:
        """The number of further sequences that may run now."""
        return self.places - len(self.running)

    def _yielding_order(self) -> list[Sequence]:
        """Return the running sequences; the last one yields first."""
        now = self._clock()
        return sorted(self.running, key=lambda sequence: self._policy.yields(self._statistics.of(sequence), now))

    def _admit(self, head: Sequence, now: float) -> bool:
        displaceable = self._displaceable(head, now)
        if self.free_places < 1 and not displaceable:
            return False
        while self.free_places < 1 or self._price(head) > self._space.available_blocks:
            missing = self._price(head) - self._space.available_blocks
            if not displaceable or missing > sum(sequence.held.count for sequence in displaceable):
                return False
            self._preempt(displaceable.pop())
        try:
            self._preemption.resume(head)
        except PoolExhausted:  # puts pin blocks until the daemon has them
            return False
        self.waiting.remove(head)
        head.level, head.since_s = self._policy.level(self._statistics.of(head), now), now
        self.run(head)
        return True

    def _price(self, head: Sequence) -> int:
        """Return how many blocks must be available: its own, and one for each running sequence, so that none must yield
        at once.
        """
        return self._preemption.price(head) + (len(self.running) + 1 if self.running else 0)

    def _displaceable(self, head: Sequence, now: float) -> list[Sequence]:
        """Return the running sequences that `head` may displace; the last one yields first."""
        candidate = self._statistics.of(head)
        return [
            sequence
            for sequence in self._yielding_order()
            if self._policy.displaces(candidate, self._statistics.of(sequence), now)
        ]

    def _preempt(self, sequence: Sequence) -> None:
        self._restorer.drop(sequence)
        self._preemption.preempt(sequence)
        self.running.remove(sequence)
        sequence.since_s = self._clock()
        self.waiting.append(sequence)
