"""SGLang's device pools through `KVStoreLinker`: its factory and its classes, a real daemon, the emulated driver.

One worker serves all tests, since SGLang takes long to import; each opens a linker, and uses conversations, of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_proto.v1 import admin_pb2
from tests.gpu.emulated import emulated_node
from tests.gpu.test_daemon_gpu_first import SETTINGS
from tests.reference.running_daemon import RunningDaemon, eventually, running_daemon

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PAGES = 8
WHOLE = {"loaded": True, "landed": True, "right": True}
CONVERSATIONS = itertools.count(1)


class Worker:
    def __init__(self, process: subprocess.Popen[str], faults: Path) -> None:
        self.process = process
        self.faults = faults  # rules for failures of its driver
        self.first = self._read()

    def __call__(self, *command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    return emulated_node(must_emulate=True)


@pytest.fixture(scope="module")
def daemon(environment: dict[str, str]) -> Iterator[RunningDaemon]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with running_daemon(*SETTINGS) as running:
            yield running


@pytest.fixture(scope="module")
def rank(
    daemon: RunningDaemon, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Worker]:
    faults = tmp_path_factory.mktemp("faults") / "rules"
    faults.write_text("")
    slow = {"EMULATED_CUDA_DELAY_US": "5000", "EMULATED_CUDA_CONTROL": str(faults)}  # waits that are missing are seen
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.sglang_worker", str(daemon.socket_dir)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment, **slow},
    )  # fmt: skip
    try:
        worker = Worker(process, faults)
        if "missing" in worker.first:
            pytest.skip(f"SGLang cannot be imported: {worker.first['missing']}")
        yield worker
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def number() -> int:
    return next(CONVERSATIONS)


@pytest.mark.parametrize(
    ("kind", "pools"),
    [
        ("mha", ["kv"]),
        ("hnd", ["kv"]),
        ("mla", ["kv"]),
        ("swa", ["kv", "swa"]),
        ("draft", ["draft", "kv"]),
        ("dsa", ["indexer", "kv"]),
    ],
)
def test_pages_come_back_into_other_pages_of_every_pool(rank: Worker, number: int, kind: str, pools: list[str]) -> None:
    assert rank("open", kind) == {"pools": pools}
    assert rank("lookup", number, PAGES) == {"lengths": []}
    assert rank("offload", number, PAGES) == {"stored": True}
    assert rank("lookup", number, PAGES + 2) == {"lengths": list(range(1, PAGES + 1))}
    for _ in range(2):  # by the buffer, and from registered memory
        assert rank("restore", number, PAGES) == WHOLE
    rank("open", kind)
    assert rank("restore", number, PAGES) == WHOLE, "for another server"


def test_kinds_of_pool_share_nothing(rank: Worker, number: int) -> None:
    rank("open", "mha")
    assert rank("offload", number, PAGES)["stored"]
    rank("open", "hnd")
    assert rank("lookup", number, PAGES) == {"lengths": []}


@pytest.mark.parametrize("kind", ["draft", "dsa"])
def test_servers_with_other_draft_models_share_no_pages_of_them(rank: Worker, number: int, kind: str) -> None:
    for draft in ("eagle", "eagle v2"):
        rank("open", kind, draft)
        assert rank("lookup", number, PAGES) == {"lengths": []}
        assert rank("offload", number, PAGES)["stored"]
    rank("open", kind, "eagle")
    assert rank("restore", number, PAGES) == WHOLE


def test_a_draft_model_does_not_keep_the_models_own_pages_from_being_shared(rank: Worker, number: int) -> None:
    rank("open", "draft", "eagle")
    assert rank("offload", number, PAGES)["stored"]
    rank("open", "mha", "eagle v2")
    assert rank("restore", number, PAGES) == WHOLE


def test_pages_that_the_daemon_has_on_the_device_are_copied_there(
    rank: Worker, daemon: RunningDaemon, number: int
) -> None:
    rank("open", "mha")
    assert rank("offload", number, PAGES)["stored"]
    before = daemon.tiers()["vram"].blocks
    assert rank("restore", number, PAGES) == WHOLE
    assert eventually(lambda: daemon.tiers()["vram"].blocks == before + PAGES), "a hit is copied to the GPU"
    for other in range(1000, 1250):  # until DRAM does not have them any more
        assert rank("offload", other, PAGES)["stored"]
    promoted = [daemon.tiers()[tier].promoted_blocks for tier in ("vram", "nvme")]
    assert rank("restore", number, PAGES) == WHOLE
    assert [daemon.tiers()[tier].promoted_blocks for tier in ("vram", "nvme")] == promoted


def test_a_load_of_what_is_gone_is_refused_and_nothing_is_held(
    rank: Worker, daemon: RunningDaemon, number: int
) -> None:
    rank("open", "mha")
    assert rank("offload", number, PAGES // 2)["stored"]
    assert rank("queue", number, PAGES) == {"queued": False}
    assert rank("restore", number, PAGES) == {"loaded": False}
    assert eventually(lambda: daemon.status().leases == 0)
    assert rank("queue", number, PAGES // 2) == {"queued": True}
    assert daemon.status().leases > 0
    assert rank("cancel") == {"cancelled": True, "index": -1}
    assert eventually(lambda: daemon.status().leases == 0)
    assert rank("cancel") == {"cancelled": False, "index": -1}


def test_a_load_that_fails_is_answered_and_nothing_is_held(rank: Worker, daemon: RunningDaemon, number: int) -> None:
    """Another rank waits for the answer. The first pool has its leases by then."""
    rank("open", "swa")
    assert rank("offload", number, PAGES)["stored"]
    assert rank("spoilt", number, PAGES) == {"queued": False}
    assert eventually(lambda: daemon.status().leases == 0)
    assert rank("restore", number, PAGES) == WHOLE


def test_chunks_of_a_prompt_form_one_chain(rank: Worker, daemon: RunningDaemon, number: int) -> None:
    """The end of a chain is lost first: what is left is a prefix."""
    rank("open", "mla")
    daemon.ask("Drop", admin_pb2.DropRequest(all=True, discard=True))
    rank("lookup", number, PAGES)
    assert rank("chunk", number, 0, PAGES // 2)["stored"] and rank("chunk", number, PAGES // 2, PAGES)["stored"]
    totals = daemon.ask("BlockTotals", admin_pb2.BlockTotalsRequest(by="prefix")).totals
    assert [total.longest_blocks for total in totals] == [PAGES]


def test_a_copy_that_fails_is_reported_and_the_worker_goes_on(rank: Worker, number: int) -> None:
    other = next(CONVERSATIONS)
    rank("open", "mha")
    assert rank("offload", number, PAGES)["stored"]
    rank.faults.write_text("cuMemcpyBatchAsync:0=1\n")
    assert rank("offload", other, PAGES) == {"stored": False}
    assert rank("restore", number, PAGES) | {"right": False} == {"loaded": True, "landed": False, "right": False}
    rank.faults.write_text("")
    assert rank("restore", number, PAGES) == WHOLE
    assert rank("offload", other, PAGES)["stored"] and rank("restore", other, PAGES) == WHOLE


def test_without_a_daemon_everything_is_computed(rank: Worker, daemon: RunningDaemon, number: int) -> None:
    other = next(CONVERSATIONS)
    rank("open", "mha")
    assert rank("offload", number, PAGES)["stored"]
    daemon.kill9()
    try:
        assert rank("lookup", number, PAGES) == {"lengths": []}
        assert rank("queue", number, PAGES) == {"queued": False}
        assert rank("offload", other, PAGES) == {"stored": False}
        assert rank("reset") == {}
    finally:
        daemon.restart()
    assert eventually(lambda: rank("offload", other, PAGES)["stored"])
    assert rank("restore", other, PAGES) == WHOLE
    assert rank("close") == {}
