"""Measures what encryption at rest costs on NVMe, and counts what is readable after a tenant was dropped.

Blocks are written to two NVMe tiers in one directory, synced, and read back, all at once as the daemon does it: one
tier encrypts, the other does not. The tiers take turns, and each figure is a median of turns. `encrypted_nvme` is the
rate of writing and reading together. `sealing` and `opening` are one block's encryption by processor time, beside
memcpy: other work on the machine changes them little. Expected: where the processor has VAES, AES-GCM on the tier's
threads is several times as fast as a disk, and what is lost is processor time that the disk's queue hides.

Then a daemon with a master key stores conversations, and their tenant is dropped. Every file of its state directory is
read, slabs and free pages of LMDB included, and searched for pieces of the token ids and payloads that were put.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from support.daemon import bench_daemon
from support.report import AT_LEAST, AT_MOST, Row, main, median, progress

from kvstore_client import Fingerprint, LayerGroup
from kvstore_proto.arena import slot_bytes
from kvstore_proto.v1 import admin_pb2
from kvstore_tiers.base import Coding, Slot
from kvstore_tiers.nvme import NvmeTier
from kvstore_tiers.nvme.seals import DataKey
from kvstore_tiers.segments import AlignedBuffer, Segment, gather, view_at
from kvstore_tiers.testing.transfers import block, finish, finish_all
from kvstored.clients.tenants.data_keys import DataKeyFile

BLOCK_BYTES, BLOCKS = 2 << 20, 64
CAPACITY_BYTES = 512 << 20
STAGING_BYTES = 64 << 20  # the default of nvme.codec_staging
TARGET, TARGET_WITH_VAES = 0.6, 0.8
PIECE_BYTES = 32
CONVERSATIONS, TOKENS = 8, 1024


@dataclass
class Turns:
    """The seconds of one tier, by turn."""

    write_s: list[float] = field(default_factory=list)
    read_s: list[float] = field(default_factory=list)

    def rate(self, *, writes: bool = True, reads: bool = True) -> float:
        """Return the median GB/s of the chosen parts."""
        moved = BLOCKS * BLOCK_BYTES * (writes + reads)
        turns = zip(self.write_s, self.read_s, strict=True)
        return moved / median([writes * into + reads * out for into, out in turns]) / 1e9


def measure(quick: bool) -> list[Row]:
    turns = 5 if quick else 15
    return [*throughput(turns), *on_one_core(turns), dropped_key()]


def throughput(turns: int) -> list[Row]:
    """Return the rows of writing and reading with and without encryption."""
    with tempfile.TemporaryDirectory(prefix="kvbench-encrypted-") as name:
        directory = Path(name)
        keys = DataKeyFile(directory, bytes(32), lambda digest: True)
        coding = Coding(staging_bytes=STAGING_BYTES)
        tiers = {
            True: NvmeTier.open(directory / "with", CAPACITY_BYTES, keys=keys, coding=coding),
            False: NvmeTier.open(directory / "without", CAPACITY_BYTES),
        }
        found = {encrypts: Turns() for encrypts in tiers}
        payloads = list(_payloads())
        for turn in range(turns + 1):  # the first one makes the files
            for encrypts in (True, False) if turn % 2 else (False, True):
                _one_turn(tiers[encrypts], payloads, found[encrypts] if turn else Turns())
        for tier in tiers.values():
            tier.close()
    ours, theirs = found[True], found[False]
    target = TARGET_WITH_VAES if " vaes " in Path("/proc/cpuinfo").read_text() else TARGET
    without = "without encryption"
    return [
        Row("encrypted_nvme", ours.rate(), "GB/s", theirs.rate(), without, AT_LEAST, target),
        Row("encrypted_nvme_write", ours.rate(reads=False), "GB/s", theirs.rate(reads=False), without),
        Row("encrypted_nvme_read", ours.rate(writes=False), "GB/s", theirs.rate(writes=False), without),
    ]


def on_one_core(turns: int) -> list[Row]:
    """Return the rows of encrypting and decrypting, GB/s of one core's time."""
    key, header, payloads = DataKey(bytes(8), bytes(32)), block(1, BLOCK_BYTES)[0], list(_payloads())
    header, target = header.stamped(1, 1), AlignedBuffer(BLOCK_BYTES)
    spent: dict[str, list[float]] = {"copying": [], "sealing": [], "opening": []}
    for _ in range(turns):
        for one in payloads:
            began = time.process_time()
            gather(target.address, [one])
            copied = time.process_time()
            sealed = key.seal(header, [one], target.segment(BLOCK_BYTES))
            encrypted = time.process_time()
            assert not isinstance(key.open(sealed, header.key, [target.segment(BLOCK_BYTES)]), str)
            ended = time.process_time()
            for name, seconds in zip(spent, (copied - began, encrypted - copied, ended - encrypted), strict=True):
                spent[name].append(seconds)
    copy, *ours = (BLOCK_BYTES / median(each) / 1e9 for each in spent.values())
    return [Row(name, rate, "GB/s", copy, "memcpy") for name, rate in zip(("sealing", "opening"), ours, strict=True)]


def _payloads() -> Iterator[Segment]:
    for number in range(BLOCKS):
        buffer = AlignedBuffer(BLOCK_BYTES)
        view_at(buffer.address, BLOCK_BYTES)[:] = np.random.default_rng(number).integers(0, 256, BLOCK_BYTES, np.uint8)
        yield buffer.segment(BLOCK_BYTES)


def _one_turn(tier: NvmeTier, payloads: Sequence[Segment], turns: Turns) -> None:
    headers = [block(number, BLOCK_BYTES)[0] for number in range(BLOCKS)]
    slots: list[Slot] = []
    for _ in headers:
        slot = tier.allocate(slot_bytes(BLOCK_BYTES))
        assert slot is not None
        slots.append(slot)
    began = time.perf_counter()
    writes = [partial(tier.write, *each) for each in zip(slots, headers, [[one] for one in payloads], strict=True)]
    assert all(outcome.ok for outcome in finish_all(writes)) and finish(tier.sync).ok
    turns.write_s.append(time.perf_counter() - began)
    began = time.perf_counter()
    reads = [
        partial(tier.read, slot, header.key, [one])
        for slot, header, one in zip(slots, headers, payloads, strict=True)
    ]  # fmt: skip
    assert all(outcome.ok for outcome in finish_all(reads))
    turns.read_s.append(time.perf_counter() - began)
    for slot in slots:
        tier.free(slot)
    assert finish(tier.sync).ok


def dropped_key() -> Row:
    """Return how many of the pieces of what was put are in any file after their tenant was dropped, as bytes."""
    with tempfile.TemporaryDirectory(prefix="kvbench-key-") as name:
        master, state = Path(name) / "master", Path(name) / "state"
        master.write_bytes(os.urandom(48))
        master.chmod(0o600)
        state.mkdir(mode=0o700)
        settings = (
            f"encryption.key_file={master}", "encryption.default=true", "host.capacity=512MiB", "nvme.capacity=256MiB",
            "host.warm_restart=off",
        )  # fmt: skip
        with bench_daemon(*settings, state_dir=state) as daemon:
            group = LayerGroup(0, "full", 0, (0, 1), 256)
            fingerprint = Fingerprint("measured", "weights", groups=(group,))
            pieces: set[bytes] = set()
            with daemon.connect(fingerprint) as session:
                for number in range(CONVERSATIONS):
                    random = np.random.default_rng(number)
                    tokens = random.integers(0, 100_000, TOKENS, np.int32)
                    count = TOKENS // fingerprint.block_tokens
                    payloads = [random.integers(0, 256, fingerprint.payload_bytes(), np.uint8) for _ in range(count)]
                    session.put(tokens, payloads=payloads, durability="always", wait="settled")
                    session.touch(tokens, ttl=100_000)
                    for whole in (tokens.astype("<i4").tobytes(), *(payload.tobytes() for payload in payloads)):
                        pieces.update(whole[at : at + PIECE_BYTES] for at in range(0, len(whole) - PIECE_BYTES, 4000))
            reply = daemon.admin("DropTenant", admin_pb2.DropTenantRequest(name=f"uid-{os.geteuid()}"))
            assert reply.key_destroyed and reply.blocks, reply
            files, nbytes, found = _search(state, pieces)
    readable = found * PIECE_BYTES
    progress(f"{reply.blocks} blocks dropped; {len(pieces)} pieces searched in {files} files, {nbytes} bytes")
    progress(f"key dropped: readable bytes found on all of the disk: {readable}")
    return Row("key_dropped_readable", readable, "bytes", 1, "a byte", AT_MOST, 0.0)


def _search(directory: Path, pieces: set[bytes]) -> tuple[int, int, int]:
    """Return how many files there are, their bytes, and how many of `pieces` are in any of them."""
    files = nbytes = 0
    found: set[bytes] = set()
    for path in directory.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            files, nbytes = files + 1, nbytes + len(content)
            found.update(piece for piece in pieces if piece in content)
    return files, nbytes, len(found)


if __name__ == "__main__":
    raise SystemExit(main(measure, __doc__))
