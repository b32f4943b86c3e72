"""A remote store that simulated nodes share, and each node's key-addressed tier over it, without bytes.

The module owns the set of objects, and the time at which a transfer or an answer completes: all nodes queue for one
medium, and each operation takes a random time more. A read of an object that is missing, or lost on the way, ends as
missing.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_proto.arena import HEADER_BYTES, BlockHeader
from kvstore_simulator.machine import MediumSpec
from kvstore_simulator.simulated_tiers import SimulatedLane, SimulatedMedium, SimulatedTier
from kvstore_simulator.virtual_time import VirtualLoop
from kvstore_tiers.base import Completion, MemoryKind, Outcome, OutcomeKind, Segment, Slot, TierInfo
from kvstored.clock import NS_PER_S
from kvstored.policy_names import REUSED

NAME = "remote"
_PARALLEL = 64


@dataclass(frozen=True, slots=True)
class RemoteSpec:
    """The settings of a simulated remote store that all nodes share. An operation takes the latency and a random time
    with the mean `jitter_s` seconds (an exponential distribution). `loss` is the share of reads that do not find a
    stored object.
    """

    latency_s: float = 0.002
    jitter_s: float = 0.0
    bytes_per_s: float = 1e9
    loss: float = 0.0
    capacity_bytes: int = 16 << 40
    share: str = REUSED


class SharedObjects:
    """The objects of a remote store, by key. When there are too many, the oldest is forgotten."""

    def __init__(self, spec: RemoteSpec, seed: int) -> None:
        self.spec = spec
        rate = spec.bytes_per_s
        self.medium = SimulatedMedium(
            MediumSpec(NAME, spec.capacity_bytes, rate, rate, spec.latency_s, _PARALLEL, True)
        )
        self.objects: OrderedDict[bytes, int] = OrderedDict()  # payload bytes
        self._used_bytes = 0
        self._random = random.Random(seed)

    def put(self, key: bytes, nbytes: int) -> None:
        self.remove(key)
        self.objects[key] = nbytes
        self._used_bytes += nbytes
        while self._used_bytes > self.spec.capacity_bytes:
            self._used_bytes -= self.objects.popitem(last=False)[1]

    def has(self, key: bytes) -> bool:
        """Return whether a read finds the object `key`."""
        return key in self.objects and self._random.random() >= self.spec.loss

    def remove(self, key: bytes) -> None:
        self._used_bytes -= self.objects.pop(key, 0)

    def jitter_ns(self) -> int:
        jitter_s = self.spec.jitter_s
        return round(self._random.expovariate(1 / jitter_s) * NS_PER_S) if jitter_s else 0


class SimulatedRemoteTier(SimulatedTier):
    """One node's tier of the simulated remote store, which follows the contract of `KeyedTier`. It loads blocks into
    the medium `first`.
    """

    def __init__(self, shared: SharedObjects, loop: VirtualLoop, first: SimulatedMedium) -> None:
        top = first.spec.name
        self.up = SimulatedLane(f"{NAME}\N{RIGHTWARDS ARROW}{top}", shared.medium, first)
        self.down = SimulatedLane(f"{top}\N{RIGHTWARDS ARROW}{NAME}", first, shared.medium)
        super().__init__(NAME, shared.medium, shared.spec.capacity_bytes, loop, self.down, self.up)
        self.info = TierInfo(NAME, "keyed", MemoryKind.FILE)
        self._shared = shared

    @property
    def is_ready(self) -> bool:
        return True

    def refuses(self, digest: bytes) -> bool:
        return False

    def write(self, slot: Slot, header: BlockHeader, segments: Sequence[Segment], done: Completion) -> None:
        self.move_in(slot, segments[0], header.key, done)

    def move_in(self, slot: Slot, source: Segment, expect_key: bytes, done: Completion) -> None:
        def written(outcome: Outcome) -> None:
            self._shared.put(expect_key, slot.nbytes - HEADER_BYTES)
            done(outcome)

        super().move_in(slot, source, expect_key, self._later(written))

    def read(self, slot: Slot, expect_key: bytes, segments: Sequence[Segment], done: Completion) -> None:
        self.move_out(slot, segments[0], expect_key, done)

    def move_out(self, slot: Slot, destination: Segment, expect_key: bytes, done: Completion) -> None:
        def read(outcome: Outcome) -> None:
            done(outcome if self._shared.has(expect_key) else Outcome(OutcomeKind.MISSING, message="not there"))

        super().move_out(slot, destination, expect_key, self._later(read))

    def find(self, tenant: bytes, keys: Sequence[bytes], done: Callable[[list[int]], None]) -> None:
        """Call `done` after one latency, with the number of payload bytes of each of `keys`, or -1 for a block that the
        store does not have.
        """
        found = [self._shared.objects.get(key, -1) for key in keys]
        now_ns = self._loop.now_ns()
        self._loop.at_ns(now_ns + self.medium.latency_ns + self._shared.jitter_ns(), done, found)

    def adopt(self, slot: Slot, tenant: bytes, key: bytes) -> None:
        """Do nothing, because keys alone name the objects of this store."""

    def discard(self, slot: Slot) -> None:
        self.free(slot)

    def remove(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._shared.remove(key)

    def _later(self, done: Completion) -> Completion:
        def ended(outcome: Outcome) -> None:
            self._loop.at_ns(self._loop.now_ns() + self._shared.jitter_ns(), done, outcome)

        return ended if self._shared.spec.jitter_s else done
