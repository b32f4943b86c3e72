"""A daemon whose GPU tier is full of blocks of one size: another size gets a chunk, whose blocks are copied to slots of
other chunks on the device.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvstore_client import Session
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_tier import SETTINGS, workers_of
from tests.reference.conversations import holds, model, payloads_of, put_conversation, tokens_of
from tests.reference.nvrtc import need_nvrtc
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
MODEL, SMALL = model(), model("small", kib_a_block=8)
BLOCKS, CONVERSATIONS = 16, 40
KILL, KILLED = "cuMemcpyDtoDAsync:1=kill", "cuMemcpyDtoDAsync=kill"


def is_whole(session: Session, number: int) -> bool:
    with session.get(tokens_of(number, BLOCKS)) as lease:
        assert holds(lease, payloads_of(number, lease.blocks, session.fingerprint)), number
        return lease.blocks == BLOCKS


def fill(daemon: RunningDaemon) -> None:
    """Conversations that grow in turn, so that each chunk has blocks of all."""
    with daemon.connect(MODEL) as session:
        for blocks in (4, 8, 12, BLOCKS):
            for number in range(CONVERSATIONS):
                put_conversation(session, number, blocks, wait="settled")
    vram = daemon.tiers()["vram"]
    assert vram.used_bytes == vram.capacity_bytes, "it is full"


def calls(trace: Path, line: str = "cuMemcpyDtoDAsync") -> int:
    return trace.read_text().split().count(line)


@pytest.mark.parametrize("kill", [False, True])
def test_a_chunk_is_emptied_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kill: bool) -> None:
    """Also when the worker has died with the first copy."""
    need_nvrtc()
    trace, control = tmp_path / "trace", tmp_path / "control"
    trace.touch()
    node = emulated_node(trace=trace, control=control if kill else None)
    if node:
        node["EMULATED_CUDA_VERSION"] = "12040"  # a call for each copy
    for name, value in node.items():
        monkeypatch.setenv(name, value)
    with running_daemon(*SETTINGS, "nvme.capacity=64MiB", "scrub.enabled=false") as daemon:
        fill(daemon)
        assert not calls(trace)
        (worker,) = workers_of(daemon.pid)
        if kill:
            control.write_text(KILL)
        with daemon.connect(SMALL) as session:
            for number in range(100, 100 + CONVERSATIONS):
                put_conversation(session, number, BLOCKS, wait="settled")
                if calls(trace, KILLED):
                    control.write_text("")
            assert eventually(lambda: calls(trace) > 0 or not node)
            for number in range(100, 100 + CONVERSATIONS):
                assert eventually(partial(is_whole, session, number))
        assert bool(calls(trace, KILLED)) == kill == (workers_of(daemon.pid) != [worker])
        assert daemon.status().counters["relocated_blocks"] > 0
        with daemon.connect(MODEL) as session:
            for number in range(CONVERSATIONS):
                assert eventually(partial(is_whole, session, number))
        assert "emulated CUDA:" not in daemon.log and "other bytes arrived" not in daemon.log
