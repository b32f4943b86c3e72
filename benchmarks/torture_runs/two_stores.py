"""kvstored and LMCache's server behind one face, so that the same faults can be done to both.

Owns the two sides: how each is started, killed, asked to store and read numbered requests of four blocks of 128 KiB,
and the places of its blocks on disk. Never damages anything and never judges.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rivals.contender import WORKERS, Command, Contender, ContenderError, contender
from rivals.environments import LMCACHE
from rivals.lmcache import QUIET, _answers, _free_ports

from kvstore_client import Fingerprint, LayerGroup, Session
from kvstore_proto.v1 import admin_pb2 as pb
from torture_runs.blocks import payload_of
from torture_runs.child_process import end_child, start_child
from torture_runs.mortal_daemon import MortalDaemon

BLOCKS = 4
BLOCK_TOKENS = 256
BYTES_A_TOKEN = 512
BLOCK_BYTES = BLOCK_TOKENS * BYTES_A_TOKEN
LMCACHE_SHAPE = "(2,256,16,2,32):float16:2"  # 2 layers of K and V, 2 heads of 32: 512 bytes a token
MODEL = Fingerprint(
    "torture", "beside LMCache", block_tokens=BLOCK_TOKENS,
    groups=(LayerGroup(0, "full", 0, (0, 1), BYTES_A_TOKEN // 2),),
)  # fmt: skip
START_TIMEOUT_S = 90.0
QUIET_FOR_S = 1.0


@dataclass(frozen=True)
class Extent:
    """The place of one block's bytes: the payload from `payload_at` on, for `BLOCK_BYTES`."""

    path: Path
    offset: int
    payload_at: int
    is_whole_file: bool


@dataclass(frozen=True)
class Read:
    """What became of a request's blocks: how many came back, how many of those with other bytes."""

    served: int
    wrong: int


class Store(ABC):
    """One side. `promised` says what its answer to a store promises."""

    name: str
    promised: str

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def kill9(self) -> None: ...

    @abstractmethod
    def store(self, number: int) -> int:
        """Blocks that its answer vouched for; 0 when there was none."""

    @abstractmethod
    def read(self, number: int) -> Read: ...

    @abstractmethod
    def forget_dram(self) -> None:
        """The next reads come from disk."""

    @abstractmethod
    def extents(self) -> list[Extent]:
        """Every block on disk."""

    @abstractmethod
    def disk_bytes(self) -> int: ...

    @abstractmethod
    def close(self) -> None: ...

    def settle(self) -> None:
        """Until nothing more is written."""
        before, since = -1, time.monotonic()
        while time.monotonic() - since < QUIET_FOR_S:
            if (now := self.disk_bytes()) != before:
                before, since = now, time.monotonic()
            time.sleep(0.1)


class Kvstored(Store):
    name = "kvstored"
    promised = "durable"

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._daemon = MortalDaemon(
            directory, "host.capacity=256MiB", "host.staging=32MiB", f"nvme.capacity={capacity_bytes}",
            "nvme.slab=4MiB", "nvme.io_threads=2", "durability.mode=always", "host.prefault=false",
        )  # fmt: skip
        self._session: Session | None = None

    def start(self) -> None:
        self._daemon.start()
        if self._session is not None:
            self._session.close()
        self._session = self._daemon.connect(MODEL, deadline_s=3.0, staging_bytes=4 << 20)

    def kill9(self) -> None:
        self._daemon.kill9()

    def store(self, number: int) -> int:
        assert self._session is not None
        payloads = [payload_of(BLOCK_BYTES, number, block) for block in range(BLOCKS)]
        receipt = self._session.put(_tokens(number), payloads=payloads, wait="settled", deadline_s=5.0)
        return receipt.durability.count("durable")

    def read(self, number: int) -> Read:
        assert self._session is not None
        with self._session.get(_tokens(number), deadline_s=10.0) as lease:
            right = sum(
                np.array_equal(lease.payload(block), payload_of(BLOCK_BYTES, number, block))
                for block in range(len(lease))
            )
            return Read(len(lease), len(lease) - right)

    def forget_dram(self) -> None:
        self._daemon.drop_host()

    def extents(self) -> list[Extent]:
        listed = self._daemon.admin("Blocks", pb.BlocksRequest(tier="nvme", limit=4096)).blocks
        places = [block.location.rpartition(":") for block in listed]
        return [Extent(Path(path), int(offset), int(offset) + 4096, False) for path, _, offset in places]

    def disk_bytes(self) -> int:
        return self._daemon.disk_bytes()

    def settle(self) -> None:
        """Its answers come after its syncs."""

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._daemon.close()


class LMCacheServer(Store):
    """`lmcache server` with one of its filesystem adapters below, and its own benchmark client."""

    promised = "stored"

    def __init__(self, directory: Path, capacity_bytes: int, adapter: str) -> None:
        self.name = f"LMCache {adapter}"
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._files = directory, directory / "l2"
        self._adapter: dict[str, Any] = {"type": adapter, "base_path": str(self._files)}
        if adapter == "fs_native":  # the other one has no capacity to be given
            eviction = {"eviction_policy": "LRU"}
            self._adapter |= {"max_capacity_gb": capacity_bytes / 2**30, "eviction": eviction, "num_workers": 2}
        self._process: subprocess.Popen[Any] | None = None
        self._stack = ExitStack()
        worker = WORKERS / "lmcache_torture_client.py"
        command: Command = [LMCACHE.bin("python"), worker, LMCACHE_SHAPE, str(BLOCKS * BLOCK_TOKENS)]
        self._client: Contender = self._stack.enter_context(contender(self.name, command, QUIET))

    def start(self) -> None:
        ports = _free_ports(3)
        http_url = f"http://127.0.0.1:{ports[1]}"
        command = [
            str(LMCACHE.bin("lmcache")), "server", "--transport", "zmq", "--host", "127.0.0.1", "--port", ports[0],
            "--http-host", "127.0.0.1", "--http-port", ports[1], "--prometheus-port", ports[2], "--l1-size-gb", "0.25",
            "--no-l1-use-lazy", "--shm-name", f"kvtorture-{os.getpid()}", "--supported-transfer-mode", "auto",
            "--eviction-policy", "LRU", "--l2-adapter", json.dumps(self._adapter),
        ]  # fmt: skip
        with (self._directory / "log").open("wb") as log:
            self._process = start_child(command, environment=QUIET, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{http_url}/healthcheck"):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise ContenderError(f"{self.name} did not start:\n{(self._directory / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        self._client.ask("connect", rpc_url=f"tcp://127.0.0.1:{ports[0]}", http_url=http_url)

    def kill9(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def store(self, number: int) -> int:
        try:
            return BLOCKS if self._client.ask("store", number=number) else 0
        except ContenderError:
            return 0  # the server is gone

    def read(self, number: int) -> Read:
        answer = self._client.ask("read", number=number)
        return Read(answer["served"], answer["wrong"])

    def forget_dram(self) -> None:
        self.kill9()
        self.start()

    def extents(self) -> list[Extent]:
        return [Extent(path, 0, 0, True) for path in sorted(self._files.glob("*.data"))]

    def disk_bytes(self) -> int:
        if not self._files.is_dir():
            return 0
        sizes = [path.stat() for path in self._files.rglob("*") if path.is_file()]
        return sum(max(status.st_size, status.st_blocks * 512) for status in sizes)

    def close(self) -> None:
        self._stack.close()
        if self._process is not None:
            end_child(self._process, 0)
        for path in Path("/dev/shm").glob(f"*kvtorture-{os.getpid()}*"):
            path.unlink(missing_ok=True)


def _tokens(number: int) -> np.ndarray[Any, Any]:
    tokens = np.full(BLOCKS * BLOCK_TOKENS, 9906, dtype=np.int32)
    tokens[0] = number
    return tokens
