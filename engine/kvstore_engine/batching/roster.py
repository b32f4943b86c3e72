"""Who waits and who runs, and who takes whose place.

Owns the two lists and the moves between them: admission in the policy's order, displacement, and making room when
blocks are short. It never computes or samples. Invariant: a sequence runs exactly while it holds blocks.
"""

from collections import Counter
from collections.abc import Callable

from kvstore_engine.batching.preemption import Preemption
from kvstore_engine.batching.restoring import Restorer
from kvstore_engine.batching.sequence import Sequence
from kvstore_engine.batching.standings import Standings
from kvstore_engine.blocks import BlockSpace
from kvstore_engine.pool import PoolExhausted
from kvstore_engine.scheduler import Policy

_LOOK_AGAIN_S = 0.25


class Roster:
    """The sequences of one engine, at most `places` of them running. `admitted` is told of each that gets blocks."""

    def __init__(
        self,
        space: BlockSpace,
        policy: Policy,
        standings: Standings,
        preemption: Preemption,
        restorer: Restorer,
        *,
        places: int,
        clock: Callable[[], float],
        admitted: Callable[[Sequence, float], None],
    ) -> None:
        self._space = space
        self._policy = policy
        self._standings = standings
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

    def leave(self, sequence: Sequence) -> None:
        """`sequence` has ended: its blocks are let go."""
        if sequence.holding is not None:
            self._restorer.drop(sequence)
            self.running.remove(sequence)
            self._space.release(sequence.holding)
            sequence.holding = None
        else:
            self.waiting.remove(sequence)
            self._preemption.forget(sequence)
        self._look_again_s = 0.0

    def admit(self) -> None:
        """Let in whoever's turn it is, as far as places, blocks and the policy's displacements go."""
        now = self._clock()
        # Whom nothing lets in now is let in when somebody leaves, comes, or, by a displacement, has waited on.
        while self.waiting and (now >= self._look_again_s or not self.running):
            head = min(self.waiting, key=lambda sequence: self._policy.turn(self._standings.of(sequence), now))
            if not self._let_in(head, now):
                self._look_again_s = now + _LOOK_AGAIN_S
                return

    def make_room(self, sequence: Sequence) -> bool:
        """Preempt the running sequence that is to yield first, be it `sequence`; False if it runs alone."""
        if len(self.running) < 2:
            return False
        self._preempt(self._yielding_order()[-1])
        return True

    def next_to_yield(self) -> Sequence | None:
        """Whom a shortage of blocks would hit now."""
        order = self._yielding_order()
        return order[-1] if order else None

    def decoding(self) -> list[Sequence]:
        """Running sequences with one token to compute, those that yield last first."""
        return [sequence for sequence in self._yielding_order() if sequence.is_decoding]

    def prompts(self) -> list[Sequence]:
        """Running sequences with prompts to compute, by whose turn it is."""
        now = self._clock()
        prompts = [sequence for sequence in self.running if not sequence.is_decoding]
        return sorted(prompts, key=lambda sequence: self._policy.turn(self._standings.of(sequence), now))

    def ahead(self, tenant: str) -> int:
        """How many of those that wait go before one more of `tenant`: tenants take turns, so that one with a long queue
        does not keep the others out.
        """
        waiting = Counter([tenant, *(sequence.request.tenant for sequence in self.waiting)])
        return min(len(self.waiting), waiting[tenant] * len(waiting) - 1)

    def of(self, request_id: str) -> list[Sequence]:
        """All answers of a request that are under way."""
        return [sequence for sequence in (*self.waiting, *self.running) if sequence.request.id == request_id]

    def _yielding_order(self) -> list[Sequence]:
        now = self._clock()
        return sorted(self.running, key=lambda sequence: self._policy.yields(self._standings.of(sequence), now))

    def _let_in(self, head: Sequence, now: float) -> bool:
        displaceable = self._displaceable(head, now)
        if len(self.running) >= self.places and not displaceable:
            return False
        while len(self.running) >= self.places or self._price(head) > self._space.available_blocks:
            missing = self._price(head) - self._space.available_blocks
            if not displaceable or missing > sum(sequence.held.count for sequence in displaceable):
                return False
            self._preempt(displaceable.pop())
        try:
            if head.swapped is not None:
                self._preemption.resume(head)
            else:
                head.holding = self._space.claim(head.request.tenant, head.tokens[: head.length])
        except PoolExhausted:  # blocks that are kept for the daemon: they come free by themselves
            return False
        self.waiting.remove(head)
        head.level, head.since_s = self._policy.level(self._standings.of(head), now), now
        self.run(head)
        return True

    def _price(self, head: Sequence) -> int:
        """Blocks that must be to be had: its own, and one for each that runs, so that they need not yield at once."""
        if head.swapped is not None:
            own = self._space.price_again(head.length, head.swapped.path)
        else:
            own = self._space.price(head.request.tenant, head.tokens[: head.length])
        return own + (len(self.running) + 1 if self.running else 0)

    def _displaceable(self, head: Sequence, now: float) -> list[Sequence]:
        """Running sequences whom `head` may displace, the first to yield last."""
        standing = self._standings.of(head)
        return [
            sequence
            for sequence in self._yielding_order()
            if self._policy.displaces(standing, self._standings.of(sequence), now)
        ]

    def _preempt(self, sequence: Sequence) -> None:
        self._restorer.drop(sequence)
        self._preemption.preempt(sequence)
        self.running.remove(sequence)
        sequence.since_s = self._clock()
        self.waiting.append(sequence)
