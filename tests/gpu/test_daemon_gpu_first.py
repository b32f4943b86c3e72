"""A daemon whose tiers are GPU, DRAM and NVMe in that order: hits are copied to the GPU, and what the GPU alone has is
read back whole, over deaths of the GPU's worker.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import Any

import pytest

from kvstore_client import Session
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_tier import workers_of
from tests.reference.conversations import holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.kvctl import Kvctl
from tests.reference.running_daemon import RunningDaemon, connected_as, eventually, running_daemon

pytestmark = pytest.mark.slow
MODEL = model()
BLOCKS = 8
SETTINGS = (
    "host.capacity=8MiB", "host.staging=2MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=off",
    "limits.staging_per_client=512KiB",
    "tier.vram.kind=gpu", "tier.vram.before_host=true", "tier.vram.capacity=4MiB", "tier.vram.chunk=2MiB",
    "tier.vram.bounce=4MiB", "tier.vram.policy=lru", "nvme.capacity=64MiB", "nvme.slab=1MiB",
)  # fmt: skip


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)


def whole(session: Session, number: int, blocks: int = BLOCKS) -> bool:
    with session.get(tokens_of(number, blocks)) as lease:
        assert holds(lease, payloads_of(number, lease.blocks, MODEL)), number
        return lease.blocks == blocks


def use(daemon: RunningDaemon, session: Session, number: int) -> None:
    """Put a conversation, get it, and see it copied to the GPU."""
    before = daemon.tiers()["vram"].blocks
    put_conversation(session, number, BLOCKS, wait="settled")
    assert whole(session, number)
    assert eventually(lambda: daemon.tiers()["vram"].blocks >= before + BLOCKS)


def put_many(session: Session, numbers: range) -> None:
    """Push what is in DRAM out of it."""
    for number in numbers:
        put_conversation(session, number, BLOCKS, wait="settled")


def test_hits_are_copied_to_the_gpu_and_read_back(capfdbinary: Any) -> None:
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        use(daemon, session, 1)
        put_many(session, range(100, 170))
        tiers = daemon.tiers()
        assert list(tiers) == ["vram", "host", "nvme"]
        assert (tiers["vram"].kind, tiers["vram"].blocks) == ("gpu", BLOCKS), "what was put and not used is not there"
        assert 0 < tiers["vram"].used_bytes <= tiers["vram"].capacity_bytes
        before = tiers["vram"].promoted_blocks, tiers["nvme"].promoted_blocks
        assert whole(session, 1)
        tiers = daemon.tiers()
        assert (tiers["vram"].promoted_blocks, tiers["nvme"].promoted_blocks) == (before[0] + BLOCKS, before[1])
        assert "vram" in Kvctl(daemon, capfdbinary)("tiers").out


def test_the_gpu_never_has_more_than_its_capacity() -> None:
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        for number in range(1, 60):
            put_conversation(session, number, BLOCKS, wait="settled")
            for _ in range(1 + number // 20):  # what is used more often than others takes their place
                assert whole(session, number)
            vram = daemon.tiers()["vram"]
            assert vram.used_bytes <= vram.capacity_bytes
        assert eventually(lambda: daemon.tiers()["vram"].evicted_blocks > 0)
        for number in range(1, 60):
            assert eventually(partial(whole, session, number))


def test_the_worker_dies_and_no_byte_is_wrong() -> None:
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        for number in range(1, 20):
            put_conversation(session, number, BLOCKS, wait="settled")
            assert whole(session, number)
        for _ in range(4):
            (worker,) = workers_of(daemon.process.pid)
            os.kill(worker, signal.SIGKILL)
            for number in range(1, 20):
                assert whole(session, number), "NVMe or DRAM has what the GPU cannot give now"
            assert eventually(lambda: len(workers_of(daemon.process.pid)) == 1)


def test_copies_wait_for_the_byte_rate_and_gets_do_not() -> None:
    """A rate at which no second copy is made while this test runs: what a client asks for comes all the same."""
    with running_daemon(*SETTINGS, "tier.vram.rate=1") as daemon, daemon.connect(MODEL) as session:
        for number in range(1, 6):
            put_conversation(session, number, BLOCKS, wait="settled")
            assert whole(session, number)
        assert eventually(lambda: daemon.status().counters["device_rate_waits"] > 0)
        copied = daemon.tiers()["vram"].blocks
        assert copied == 1, "as much as a burst, and no block waits with a slot"
        put_many(session, range(100, 170))
        for number in range(1, 6):
            assert whole(session, number)
        assert daemon.tiers()["vram"].promoted_blocks == 1


def test_tenants_share_no_memory_of_the_gpu() -> None:
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        daemon.socket_dir.parent.chmod(0o711)
        use(daemon, session, 1)
        with connected_as(daemon, 65534, MODEL) as other:
            assert other.lookup(tokens_of(1, BLOCKS)).blocks == 0
            with other.get(tokens_of(1, BLOCKS)) as lease:
                assert lease.blocks == 0
            put_conversation(other, 1, BLOCKS, wait="settled")
            assert whole(other, 1) and whole(session, 1)
