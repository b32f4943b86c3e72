"""Objects that are mapped in turns: the next one is brought to DRAM before it is asked for, by a live daemon's
predictor, on a clock that the test moves.
"""

from __future__ import annotations

import gc
import time

import numpy as np

from kvstore_client import connect
from kvstore_client.objects.sources import BytesSource
from kvstore_client.objects.store import ObjectStore
from kvstore_proto.manifest import PART_CLASSES
from kvstore_proto.objects import OBJECTS
from tests.reference.clocked_daemon import ClockedDaemon, clocked_daemon
from tests.reference.running_daemon import PATIENCE_S, eventually

PART, PARTS = PART_CLASSES[5], 5
PAUSE_S, TICK_S = 20.0, 0.5
NAMES = ("first", "second", "third")


class Uses:
    """Uses of objects of a daemon, on its clock."""

    def __init__(self, daemon: ClockedDaemon) -> None:
        self.daemon = daemon
        session = connect(
            daemon.socket_dir, fingerprint=OBJECTS, required=True, staging_bytes=2 << 20, connect_timeout_s=PATIENCE_S,
        )  # fmt: skip
        self.store = ObjectStore(session, deadline_s=PATIENCE_S)
        rng = np.random.default_rng(0)
        self.contents = {name: rng.integers(0, 256, PARTS * PART, np.uint8).tobytes() for name in NAMES}
        for name, data in self.contents.items():
            self.store.put(name, BytesSource(data), part_bytes=PART)
        self.keys = {name: self.store.located(self.store.find(name))[0] for name in NAMES}

    def use(self, name: str) -> None:
        with self.store.map(name) as mapped:
            assert mapped.content.tobytes() == self.contents[name]
        gc.collect()
        self.drop_host()

    def drop_host(self) -> None:
        """Leave no copy in DRAM. Leases are given back with the next request."""

        def is_empty() -> bool:
            self.store.listed()
            return not self.daemon.drop("host").kept_blocks

        assert eventually(is_empty)

    def later(self, seconds: float) -> None:
        """Let time pass, slowly enough that the daemon plans and moves meanwhile."""
        for _ in range(round(seconds / TICK_S)):
            self.daemon.clock.advance(s=TICK_S)
            time.sleep(0.15)

    def parts_in_dram(self, name: str) -> int:
        return self.store.session.lookup(keys=self.keys[name]).tiers.count("host")


def test_the_next_object_of_a_cycle_is_in_dram_before_it_is_asked_for() -> None:
    settings = (
        "prefetch.enabled=true", "prefetch.predictor=markov", "prefetch.min_probability=0.2",
        "limits.lease_ttl_ms=1000000000",
    )  # fmt: skip
    with clocked_daemon(*settings) as daemon:
        uses = Uses(daemon)
        for name in 4 * NAMES:
            uses.use(name)
            daemon.clock.advance(s=PAUSE_S)
        uses.drop_host()
        uses.use("first")
        waited_s = 0.0
        while waited_s < PAUSE_S and uses.parts_in_dram("second") < PARTS:
            uses.later(TICK_S)
            waited_s += TICK_S
        assert uses.parts_in_dram("second") == PARTS and waited_s < PAUSE_S
        daemon.clock.advance(s=PAUSE_S - waited_s)
        before = daemon.ask(lambda store: store.prefetcher.statistics().all)
        uses.use("second")
        after = daemon.ask(lambda store: store.prefetcher.statistics().all)
        assert after.used_blocks - before.used_blocks >= PARTS
        assert after.demanded_blocks - before.demanded_blocks <= 1, "its manifest at most"
        uses.store.close()
