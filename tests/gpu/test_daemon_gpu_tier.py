"""A daemon with a GPU tier below DRAM: what was put is read back whole, over deaths of the GPU's worker."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from kvstore_client import Session
from tests.gpu.emulated import emulated_node
from tests.reference.conversations import holds, model, payloads_of, tokens_of
from tests.reference.running_daemon import eventually, running_daemon

pytestmark = pytest.mark.slow
MODEL = model()
BLOCKS, CONVERSATIONS = 8, 60
SETTINGS = (
    "host.capacity=6MiB", "host.staging=1MiB", "host.arena=1MiB", "host.policy=lru", "host.warm_restart=off",
    "tier.vram.kind=gpu", "tier.vram.capacity=8MiB", "tier.vram.chunk=2MiB", "tier.vram.bounce=4MiB",
    "tier.vram.policy=lru", "nvme.capacity=32MiB", "nvme.slab=1MiB",
)  # fmt: skip


def workers_of(daemon: int) -> list[int]:
    """The processes that a daemon started for its GPUs."""
    found: list[int] = []
    for children in Path(f"/proc/{daemon}/task").glob("*/children"):
        for each in map(int, children.read_text().split()):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                if b"kvstore_tiers.gpu.worker" in Path(f"/proc/{each}/cmdline").read_bytes():
                    found.append(each)
    return found


def test_blocks_are_demoted_to_the_gpu_and_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in emulated_node().items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS) as daemon, daemon.connect(MODEL) as session:
        for number in range(CONVERSATIONS):
            session.put(tokens_of(number, BLOCKS), payloads=payloads_of(number, BLOCKS, MODEL), wait="settled")
        tiers = daemon.tiers()
        assert list(tiers) == ["host", "vram", "nvme"]
        assert (tiers["vram"].kind, tiers["vram"].path) == ("gpu", "memory of CUDA device 0")
        assert tiers["vram"].blocks > 0 and tiers["vram"].used_bytes <= tiers["vram"].capacity_bytes
        for _ in range(3):
            before = daemon.tiers()["vram"]
            for number in range(CONVERSATIONS):
                assert eventually(partial(is_whole, session, number))  # a get does not wait for a new worker
            assert daemon.tiers()["vram"].promoted_blocks > before.promoted_blocks
            (worker,) = workers_of(daemon.process.pid)
            os.kill(worker, signal.SIGKILL)
        maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
        assert "libcuda" not in maps, "the daemon itself holds no CUDA context"


def is_whole(session: Session, number: int) -> bool:
    with session.get(tokens_of(number, BLOCKS)) as lease:
        assert holds(lease, payloads_of(number, lease.blocks, MODEL)), number
        return lease.blocks == BLOCKS
