"""A process imports memory of the GPU tier and writes to it, which CUDA cannot forbid: nothing it writes is taken for a
block.
"""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from kvstore_proto.arena import DEVICE_ARENAS, HEADER_BYTES, payload_checksum
from kvstore_tiers.base import OutcomeKind
from kvstore_tiers.gpu import GpuTier, GpuWorkerSettings
from kvstore_tiers.testing.transfers import block, get, put
from tests.gpu.emulated import emulated_node

pytestmark = pytest.mark.slow
CHUNK_BYTES = 2 << 20
PAYLOAD_BYTES = 50_000
WRITE = """
import mmap, sys, ctypes
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.copies import CopyRun, Runs
descriptor, chunk_bytes, offset, path = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
driver = CudaDevice(0).use_in_this_thread()
address = driver.map(driver.import_descriptor(descriptor), chunk_bytes)
data = open(path, "rb").read()
memory = mmap.mmap(-1, 1 << 20)
memory[: len(data)] = data
source = ctypes.addressof(ctypes.c_char.from_buffer(memory))
driver.register(source, 1 << 20)
stream = driver.stream()
driver.copy(Runs.of([CopyRun(address + offset, source, len(data))]), "to device", stream)
driver.synchronize(stream)
"""


def overwrite(tier: GpuTier, node: dict[str, str], container: int, offset: int, data: bytes, scratch: Path) -> None:
    """Overwrite a block as another process of the same machine would."""
    scratch.write_bytes(data)
    descriptor, nbytes = tier.export(container)
    arguments = [str(descriptor), str(nbytes), str(offset), str(scratch)]
    subprocess.run([sys.executable, "-c", WRITE, *arguments], env=os.environ | node, pass_fds=[descriptor], check=True)
    os.close(descriptor)


READ = """
import mmap, sys, ctypes
from kvstore_cuda.device import CudaDevice
from kvstore_cuda.copies import CopyRun, Runs
descriptor, chunk_bytes, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
driver = CudaDevice(0).use_in_this_thread()
address = driver.map(driver.import_descriptor(descriptor), chunk_bytes, read_only=True)
memory = mmap.mmap(-1, chunk_bytes)
to = ctypes.addressof(ctypes.c_char.from_buffer(memory))
driver.register(to, chunk_bytes)
stream = driver.stream()
driver.copy(Runs.of([CopyRun(to, address, chunk_bytes)]), "to host", stream)
driver.synchronize(stream)
open(path, "wb").write(memory)
"""


def contents(tier: GpuTier, node: dict[str, str], container: int, scratch: Path) -> bytes:
    """Return the contents of a whole chunk, as another process of the same machine reads it."""
    descriptor, nbytes = tier.export(container)
    arguments = [str(descriptor), str(nbytes), str(scratch)]
    subprocess.run([sys.executable, "-c", READ, *arguments], env=os.environ | node, pass_fds=[descriptor], check=True)
    os.close(descriptor)
    return scratch.read_bytes()


@pytest.mark.parametrize("what", ["payload", "header and payload"])
def test_a_block_that_an_importer_forged_is_corrupt(tmp_path: Path, what: str) -> None:
    node = emulated_node()
    tier = GpuTier(
        2 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES, settings=GpuWorkerSettings(variables=node)
    )
    with closing(tier):
        header, payload = block(1, PAYLOAD_BYTES)
        slot = put(tier, header, payload)
        assert slot is not None and slot.container >= DEVICE_ARENAS
        assert get(tier, slot, header.key, PAYLOAD_BYTES)[0].ok
        forged = bytes(255 - np.asarray(payload))
        data, offset = forged, slot.offset + HEADER_BYTES
        if what != "payload":
            data = header.stamped(slot.generation, payload_checksum(forged)).pack() + forged
            offset = slot.offset
        overwrite(tier, node, slot.container, offset, data, tmp_path / "data")
        outcome, _ = get(tier, slot, header.key, PAYLOAD_BYTES)
        assert outcome.kind is OutcomeKind.CORRUPT


def test_an_importer_finds_nothing_in_new_memory_that_was_there_before(tmp_path: Path) -> None:
    """A driver need not clear the memory that it gives out: the emulated one fills it."""
    node = emulated_node()
    tier = GpuTier(
        2 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, bounce_bytes=CHUNK_BYTES, settings=GpuWorkerSettings(variables=node)
    )
    with closing(tier):
        header, payload = block(1, PAYLOAD_BYTES)
        slot = put(tier, header, payload)
        assert slot is not None
        found = contents(tier, node, slot.container, tmp_path / "found")
        assert any(found[slot.offset : slot.offset + slot.nbytes])
        assert not any(found[: slot.offset]) and not any(found[slot.offset + slot.nbytes :])


def test_a_chunk_has_one_owner_and_a_number_that_no_other_memory_has() -> None:
    with closing(
        GpuTier(2 * CHUNK_BYTES, chunk_bytes=CHUNK_BYTES, settings=GpuWorkerSettings(variables=emulated_node()))
    ) as tier:
        first, second = tier.allocate(8192, "one"), tier.allocate(8192, "other")
        assert first is not None and second is not None and first.container != second.container
        assert (tier.owner(first.container), tier.owner(second.container)) == ("one", "other")
        tier.free(first)
        third = tier.allocate(8192, "third")  # in memory that was the first one's share of the capacity
        assert third is not None and third.container not in (first.container, second.container)
        assert tier.owner(first.container) is None
        with pytest.raises(OSError):
            tier.export(first.container)
