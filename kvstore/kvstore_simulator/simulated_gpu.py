"""A simulated device's memory as a tier of the store, without bytes.

Owns when a copy to and from the device completes: over the link that the engine's own copies take too, also where the
device's process reads NVMe. An engine on
that device copies what it uses into its own blocks at the speed of the device's memory.
"""

from __future__ import annotations

from kvstore_proto.arena import DEVICE_ARENAS
from kvstore_simulator.machine import ENGINE, GPU
from kvstore_simulator.media import Medium, SimulatedLane
from kvstore_simulator.simulated_tiers import SimulatedTier
from kvstore_simulator.virtual_time import VirtualLoop
from kvstore_tiers.base import Completion, Load, MemoryKind, Slot, TierInfo
from kvstore_tiers.containers import SingleSlots
from kvstore_tiers.image import FileImage


class SimulatedGpuTier(SimulatedTier):
    """`link` is the engine's, between the device's memory `medium` and `host`. `nvme`: what it reads past DRAM; None:
    nothing."""

    def __init__(
        self,
        name: str,
        medium: Medium,
        capacity_bytes: int,
        loop: VirtualLoop,
        link: Medium,
        host: Medium,
        nvme: Medium | None = None,
    ) -> None:
        top = host.spec.name
        self.up = SimulatedLane(f"{GPU}\N{RIGHTWARDS ARROW}{top}", link, host)
        self.down = SimulatedLane(f"{top}\N{RIGHTWARDS ARROW}{GPU}", host, link)
        self.to_engine = SimulatedLane(f"{GPU}\N{RIGHTWARDS ARROW}{ENGINE}", medium, medium)
        self.straight: SimulatedLane | None = None
        if nvme is not None:
            self.straight = SimulatedLane(f"{nvme.spec.name}\N{RIGHTWARDS ARROW}{GPU}", nvme, link)
        super().__init__(name, medium, capacity_bytes, loop, self.down, self.up, MemoryKind.DEVICE)
        self.info = TierInfo(name, GPU, MemoryKind.DEVICE, is_exported=True, loads_files=nvme is not None)
        self._slots = SingleSlots(capacity_bytes, DEVICE_ARENAS)

    def loader(self, slot: Slot, expect_key: bytes) -> Load:
        lane = self.straight
        if lane is None:
            return super().loader(slot, expect_key)

        def load(image: FileImage, ended: Completion) -> None:
            self._send(lane, slot.nbytes, ended)

        return load

    def owner(self, container: int) -> str | None:
        """As the GPU tier's: whose blocks are in a chunk of it. There are no owners here."""
        return "" if container > DEVICE_ARENAS else None
