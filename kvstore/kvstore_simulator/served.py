"""What a simulated node has done so far: its visits, its compute, and what the tiers held now and then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstore_simulator.visit import Visit
from kvstored.clock import NS_PER_S
from kvstored.store.policies import Policy, ResidencyClass


@dataclass(slots=True)
class Sample:
    """What a tier held at a time, in blocks by how soon its policy expects them to be needed."""

    at_s: float
    tier: str
    hot: int
    warm: int
    cold: int


@dataclass(slots=True)
class Served:
    """`refused`: requests that are longer than the engine's memory. `streamed_bytes`: from the engine's memory into
    SRAM, for computing. `lasted_s`: until the last first token."""

    visits: list[Visit] = field(default_factory=list)
    refused: int = 0
    lasted_s: float = 0.0
    compute_busy_s: float = 0.0
    streamed_bytes: float = 0.0
    largest_queue: int = 0
    rounds: list[list[Sample]] = field(default_factory=list)

    @property
    def samples(self) -> list[Sample]:
        return [sample for each in self.rounds for sample in each]

    def thin(self) -> None:
        """Keep every second round, and the first."""
        self.rounds = self.rounds[::2]

    def sample(self, held: Iterable[tuple[str, Policy]], now_ns: int) -> None:
        """Note what each tier holds now, in the words of its policy."""
        found: list[Sample] = []
        self.rounds.append(found)
        for name, policy in held:
            counts = policy.class_counts(now_ns)
            hot, warm, cold = counts[ResidencyClass.HOT], counts[ResidencyClass.WARM], counts[ResidencyClass.COLD]
            found.append(Sample(round(now_ns / NS_PER_S, 3), name, hot, warm, cold))
