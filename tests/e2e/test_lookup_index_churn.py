"""Probes beside writers and eviction: what a probe says may be old, and never leads to a wrong byte.

Readers probe chains, read the blocks that the probe named, and compare every byte with what its name says it must be. A
block under a lease cannot leave, so there the index is held to the truth: it must not call that block absent.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_client import BlockKeys, Lease, Session
from tests.reference.conversations import model, payloads_of, tokens_of
from tests.reference.examples import fewer
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

MODEL = model(kib_a_block=1)
CONVERSATIONS = 48
BLOCKS = 64
PROBES_A_GET = 4
TIERS = ("host.capacity=18MiB", "host.staging=8MiB", "nvme.capacity=8MiB", "nvme.slab=1MiB")


@dataclass
class Counts:
    answers: int = 0  # keys probed
    present: int = 0
    unknown: int = 0
    stale: int = 0  # blocks that were said to be there, and were not to be had
    blocks_read: int = 0
    wrong_blocks: int = 0
    denied: int = 0  # blocks under our lease that the index called absent


class Reader(threading.Thread):
    """One client that probes, reads and compares, until the test stops it."""

    def __init__(
        self, daemon: RunningDaemon, seed: int, stop: threading.Event, truth: list[npt.NDArray[np.uint8]]
    ) -> None:
        super().__init__(daemon=True)
        self.counts = Counts()
        self.error = ""
        self._daemon = daemon
        self._rng = random.Random(seed)
        self._stop_wanted = stop
        self._truth = truth

    def run(self) -> None:
        try:
            with self._daemon.connect(MODEL, staging_bytes=0) as session:
                chains = [session.keys(tokens_of(name, BLOCKS)) for name in range(CONVERSATIONS)]
                probed = [lambda keys=keys: session.probe(keys=keys).tiers for keys in chains]
                assert eventually(lambda: any(set(tiers()) != {"unknown"} for tiers in probed)), "no index came"
                while not self._stop_wanted.is_set():
                    name = self._rng.randrange(CONVERSATIONS)
                    keys = chains[name]
                    assert keys is not None
                    self._step(session, name, keys)
        except Exception as error:
            self.error = repr(error)

    def _step(self, session: Session, name: int, keys: BlockKeys) -> None:
        said = 0
        for _ in range(PROBES_A_GET):
            probed = session.probe(keys=keys)
            said = probed.blocks
            self.counts.answers += len(keys)
            self.counts.unknown += probed.tiers.count("unknown")
            self.counts.present += probed.blocks
        if not said:
            return
        with session.get(keys=keys[:said], promote=self._rng.random() < 0.2) as lease:
            self._compare(name, lease)
            self.counts.stale += said - max(len(lease), lease.resident_blocks)
            under_lease = session.probe(keys=keys[: len(lease)]).tiers
            if lease.valid:
                self.counts.denied += under_lease.count("absent")

    def _compare(self, name: int, lease: Lease) -> None:
        found = [lease.payload(block) for block in range(len(lease))]
        expected = self._truth[name]
        wrong = sum(not np.array_equal(payload, expected[block]) for block, payload in enumerate(found))
        if lease.valid:  # then all of it was under the lease
            self.counts.wrong_blocks += wrong
            self.counts.blocks_read += len(lease)


def write_until(daemon: RunningDaemon, seed: int, stop: threading.Event, truth: list[npt.NDArray[np.uint8]]) -> None:
    rng = random.Random(seed)
    with daemon.connect(MODEL) as session:
        for name in range(seed % 2, CONVERSATIONS, 2):
            session.put(tokens_of(name, BLOCKS), payloads=list(truth[name]))
        while not stop.is_set():
            name, blocks = rng.randrange(CONVERSATIONS), rng.randint(1, BLOCKS)
            session.put(tokens_of(name, blocks), payloads=list(truth[name][:blocks]), durability="batch")


def churn(answers: int, slots: int, patience_s: float) -> Counts:
    """Store and remove until there were `answers` answers, and `gone` blocks have left meanwhile."""
    truth = [np.stack(payloads_of(name, BLOCKS, MODEL)) for name in range(CONVERSATIONS)]
    with running_daemon(*TIERS, f"index.slots={slots}") as daemon:
        stop = threading.Event()
        writers = [threading.Thread(target=write_until, args=(daemon, seed, stop, truth)) for seed in (1, 2)]
        crowd = [Reader(daemon, 10 + seed, stop, truth) for seed in range(2)]

        def is_enough() -> bool:
            gone = daemon.status().counters["evicted_blocks"]
            return gone >= answers // 100 and sum(reader.counts.answers for reader in crowd) >= answers

        for thread in (*writers, *crowd):
            thread.start()
        enough = eventually(is_enough, patience_s)
        stop.set()
        for thread in (*writers, *crowd):
            thread.join()
        assert [reader.error for reader in crowd if reader.error] == []
        assert enough, "the readers were too slow, or nothing was under pressure"
        compare_with_lookup(daemon)
    total = Counts()
    for reader in crowd:
        for name, amount in vars(reader.counts).items():
            setattr(total, name, getattr(total, name) + amount)
    return total


def compare_with_lookup(daemon: RunningDaemon) -> None:
    """Compare once nothing moves any more: the index says what the daemon says."""
    with daemon.connect(MODEL) as session:
        sure = 0
        for name in range(CONVERSATIONS):
            tokens = tokens_of(name, BLOCKS)
            probed, found = session.probe(tokens).tiers, session.lookup(tokens).tiers
            assert len(probed) == len(found) == BLOCKS
            assert [(a, b) for a, b in zip(probed, found, strict=True) if a not in (b, "unknown")] == []
            sure += sum(tier != "unknown" for tier in probed)
        assert sure > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answers", "slots"),
    [
        pytest.param(100_000, 6144, id="roomy", marks=pytest.mark.slow),
        pytest.param(100_000, 1200, id="overflowing", marks=pytest.mark.slow),
        pytest.param(4_000, 1200, id="a while"),
    ],
)
def test_answers_beside_eviction_and_no_wrong_byte(answers: int, slots: int) -> None:
    total = churn(answers, slots, patience_s=150)
    assert total.blocks_read > answers // 100 and total.present > answers // 10
    assert (total.wrong_blocks, total.denied) == (0, 0), total
    assert (total.unknown > total.answers // 20) is (slots < 2000), total


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_million_answers_beside_eviction_and_no_wrong_byte() -> None:
    answers = fewer(10_000_000, 0.1)
    total = churn(answers, slots=6144, patience_s=1000)
    print(total)
    assert total.answers >= answers and total.blocks_read > answers // 100
    assert total.stale > 0, "nothing was ever stale: this proved nothing"
    assert (total.wrong_blocks, total.denied) == (0, 0), total
