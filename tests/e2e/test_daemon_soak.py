"""Many clients doing everything at once, against a dictionary: what a get returns is what some client put there."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

from kvstore_client import Fingerprint
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.running_daemon import PATIENCE_S, RunningDaemon, eventually, running_daemon

MODELS = (model("a"), model("b", kib_a_block=32), model("c", kib_a_block=8, key_hash="blake2b"))
CONVERSATIONS = 60
MAX_BLOCKS = 12


class Worker(threading.Thread):
    """One client. The model is the function payloads_of: each block that is found must have its value."""

    def __init__(self, daemon: RunningDaemon, seed: int, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self.running = daemon
        self.rng = random.Random(seed)
        self.stop = stop
        self.faults: list[str] = []
        self.hits = self.stored = 0

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                fingerprint = self.rng.choice(MODELS)
                with self.running.connect(fingerprint) as session:
                    for _ in range(self.rng.randint(1, 12)):
                        self._step(session, fingerprint)
        except Exception as error:
            self.faults.append(repr(error))

    def _step(self, session: object, fingerprint: Fingerprint) -> None:
        rng, conversation, blocks = self.rng, self.rng.randrange(CONVERSATIONS), self.rng.randint(1, MAX_BLOCKS)
        tokens = tokens_of(conversation, blocks)
        what = rng.choices(("put", "get", "hold", "prefetch", "touch", "lookup"), (5, 6, 1, 2, 1, 2))[0]
        if what == "put":
            mode = rng.choice(("none", "batch", "batch", "always"))
            receipt = session.put(tokens, payloads=payloads_of(conversation, blocks, fingerprint), durability=mode)  # type: ignore[attr-defined]
            self.stored += receipt.stored_blocks
            if "failed" in receipt.statuses:
                self.faults.append(f"put failed: {receipt}")
            if mode == "always" and "pending" in receipt.durability:
                self.faults.append(f"always, and not decided: {receipt} {receipt.durability}")
        elif what in ("get", "hold"):
            with session.get(tokens) as lease:  # type: ignore[attr-defined]
                if what == "hold":
                    time.sleep(rng.random() * 0.05)
                for block, expected in enumerate(payloads_of(conversation, len(lease), fingerprint)):
                    if not np.array_equal(lease.payload(block), expected):
                        self.faults.append(f"wrong bytes: {conversation}/{block} of {fingerprint.weights_digest}")
                self.hits += len(lease)
        elif what == "lookup":
            found = session.lookup(tokens)  # type: ignore[attr-defined]
            if any(tier != "absent" for tier in found.tiers[found.blocks :]):
                self.faults.append(f"a hole: {found}")
        else:
            getattr(session, what)(tokens)


def soak(seconds: float, clients: int, seed: int) -> None:
    """That long, or on a slow machine until enough has happened."""
    settings = ("host.capacity=16MiB", "host.staging=4MiB", "nvme.capacity=8MiB", "nvme.slab=1MiB")
    with running_daemon(*settings, "limits.staging_per_client=512KiB") as daemon:
        until_s, stop = time.monotonic() + seconds, threading.Event()
        workers = [Worker(daemon, seed + number, stop) for number in range(clients)]

        def is_enough() -> bool:
            counters = daemon.status().counters
            pressure = counters["evicted_blocks"] + counters["promoted_blocks"]
            done = min(worker.stored for worker in workers) > 0 and sum(worker.hits for worker in workers) > 100
            return done and pressure > 0

        for worker in workers:
            worker.start()
        rng = random.Random(seed)
        while time.monotonic() < until_s or not (is_enough() or time.monotonic() > until_s + PATIENCE_S):
            for tier in daemon.tiers().values():
                assert tier.used_bytes <= tier.capacity_bytes, tier
            if rng.random() < 0.1:
                daemon.drop(rng.choice(("host", "nvme")), discard=rng.random() < 0.3)
            time.sleep(0.1)
        enough = is_enough()
        stop.set()
        for worker in workers:
            worker.join(120)
            assert not worker.is_alive(), "a client hangs"
        faults = [fault for worker in workers for fault in worker.faults]
        assert faults == [], f"{len(faults)}: {faults[:5]}"
        assert enough, "nothing was stored or found, or the tiers were never under pressure"
        assert eventually(lambda: daemon.status().leases == 0)
        counters = daemon.status().counters
        assert counters["corrupt_blocks"] == counters["read_failures"] == counters["write_failures"] == 0
        stored = daemon.status()
        assert stored.limbo_bytes == 0


@pytest.mark.slow
def test_four_clients_for_a_while() -> None:
    soak(4, 4, seed=1)


@pytest.mark.slow
def test_eight_clients_for_longer() -> None:
    soak(60, 8, seed=2)
