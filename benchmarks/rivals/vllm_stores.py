"""The two stores that benchmarks/rivals/vllm_fs.py compares: how vLLM uses each, and where their blocks lie on disk.

Owns what a store must be told, alike for both: DRAM, a place on disk, and that everything found is loaded. Never
measures.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from support.daemon import bench_daemon

from kvstore_proto.arena import HEADER_BYTES, TOKENS_OFFSET
from kvstore_proto.v1 import admin_pb2
from kvstore_tiers.nvme.layout import (
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    RecordState,
    Superblock,
    read_superblock,
    record_header,
)

MIB = 1 << 20
DRAM_BYTES, STAGING_BYTES = 192 * MIB, 64 * MIB
PATIENCE_S = 120.0
Place = tuple[Path, int, int]  # a file, and where in it bytes of a block are, from and to


@dataclass(frozen=True)
class Opened:
    """`transfer`: fields of KVTransferConfig. `stored`: a number that grows while the store still writes."""

    transfer: dict[str, Any]
    stored: Callable[[], int]


class Ours:
    """`state`: a directory for what the daemon keeps beside the blocks."""

    name = "kvstored"

    def __init__(self, state: Path) -> None:
        self._state = state

    @contextmanager
    def opened(self, disk: Path, room: int) -> Iterator[Opened]:
        settings = (
            f"host.capacity={DRAM_BYTES + STAGING_BYTES}", f"host.staging={STAGING_BYTES}", "host.warm_restart=off",
            f"nvme.path={disk}/nvme", f"nvme.capacity={room}", f"nvme.slab={4 * MIB}",
        )  # fmt: skip
        with bench_daemon(*settings, state_dir=self._state) as daemon:
            extra = {"socket": str(daemon.socket_dir), "weights_digest": "dummy", "always_load": True,
                     "lookup_deadline_ms": 5000, "load_deadline_ms": 10_000}  # fmt: skip

            def stored() -> int:
                return int(daemon.admin("Status", admin_pb2.StatusRequest()).counters.get("stored_bytes", 0))

            # No flush at the end: it writes whatever DRAM has to a disk that is full, in place of what the policy kept.
            yield Opened({"kv_connector_extra_config": extra}, stored)

    def blocks(self, disk: Path, since_ns: int, until_ns: int) -> list[list[Place]]:
        """Return the places of each block stored between two times of the wall clock, after the store has ended."""
        by_tokens: dict[bytes, list[Place]] = defaultdict(list)  # one slot for each group of layers
        for slab in sorted(disk.glob("nvme/slabs/*.slab")):
            raw = slab.read_bytes()
            block = read_superblock(raw[:SUPERBLOCK_BYTES])
            for index in range(block.slots if isinstance(block, Superblock) else 0):
                record = raw[SUPERBLOCK_BYTES + index * RECORD_BYTES :][:RECORD_BYTES]
                header = record_header(record) if record[6] == RecordState.LIVE else None
                if header is not None and since_ns <= header.created_ns < until_ns:
                    start = block.slot_offset(index) + HEADER_BYTES
                    tokens = raw[start - HEADER_BYTES + TOKENS_OFFSET : start]
                    by_tokens[tokens].append((slab, start, start + header.payload_bytes))
        return list(by_tokens.values())


class FileTier:
    """`is_cleaned`: before the disk is full, files that were not used for the longest time are removed."""

    def __init__(self, *, is_cleaned: bool = False) -> None:
        self.name = "the file tier, cleaned" if is_cleaned else "the file tier"
        self._is_cleaned = is_cleaned

    @contextmanager
    def opened(self, disk: Path, room: int) -> Iterator[Opened]:
        tier = {"type": "fs", "root_dir": str(disk / "files")}
        extra = {"spec_name": "HostTieringSpec", "spec_module_path": "host_spec",  # beside engine_child.py
                 "cpu_bytes_to_use": DRAM_BYTES, "offload_prompt_only": False, "secondary_tiers": [tier]}  # fmt: skip
        ended = threading.Event()
        cleaner = threading.Thread(target=self._clean, args=(disk, ended), daemon=True)
        if self._is_cleaned:
            cleaner.start()
        connector = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
        yield Opened(connector | {"kv_connector_extra_config": extra}, lambda: len(list(disk.rglob("*.bin"))))
        ended.set()
        if self._is_cleaned:
            cleaner.join()

    def blocks(self, disk: Path, since_ns: int, until_ns: int) -> list[list[Place]]:
        by_hash: dict[str, list[Place]] = defaultdict(list)  # one file for each group of layers
        for path in sorted(disk.rglob("*.bin")):
            if since_ns <= path.stat().st_mtime_ns < until_ns:
                by_hash[path.stem].append((path, 0, path.stat().st_size))
        return list(by_hash.values())

    def _clean(self, disk: Path, ended: threading.Event) -> None:
        while not ended.wait(0.05):
            usage = shutil.disk_usage(disk)
            if usage.free < 0.15 * usage.total:
                remove_unused(disk.rglob("*.bin"), usage.total // 4 - usage.free)


Store = Ours | FileTier


def remove_unused(files: Iterable[Path], nbytes: int) -> None:
    """Remove files of at least `nbytes` together, those first that were neither read nor written for longest."""
    for path in sorted(files, key=_used_s):
        if nbytes <= 0:
            return
        nbytes -= path.stat().st_size
        path.unlink()


def _used_s(path: Path) -> float:
    return max(path.stat().st_atime, path.stat().st_mtime)


def settled(opened: Opened, quiet_s: float = 1.5) -> int:
    """Wait until the store has written nothing for `quiet_s` seconds; return the time of the wall clock."""
    deadline, last, since = time.monotonic() + PATIENCE_S, -1, time.monotonic()
    while time.monotonic() < since + quiet_s:
        if time.monotonic() > deadline:
            raise RuntimeError("the store does not come to rest")
        if (now := opened.stored()) != last:
            last, since = now, time.monotonic()
        time.sleep(0.1)
    return time.time_ns()


def flip(blocks: list[list[Place]]) -> None:
    """Flip one bit of each block, in one of its places."""
    draw = np.random.default_rng(3)
    for places in blocks:
        path, start, end = places[int(draw.integers(len(places)))]
        with path.open("r+b") as file:
            file.seek(at := int(draw.integers(start, end)))
            byte = file.read(1)[0] ^ 1 << int(draw.integers(8))
            file.seek(at)
            file.write(bytes([byte]))
