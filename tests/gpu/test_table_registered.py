"""A table's mapping is registered with a device while it is used there, and copies of rows come from where they lie."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvstore_client.objects.store import open_objects
from kvstore_client.objects.tables import array_source
from tests.gpu.emulated import emulated_node
from tests.reference.running_daemon import running_daemon

pytestmark = pytest.mark.slow
COUNT, WIDTH = 3000, 64
GATHER = f"""
import mmap, sys
import numpy as np
from kvstore_client.objects.store import open_objects
from kvstore_client.objects.tables import Table
from kvstore_cuda.copies import Runs
from kvstore_cuda.device import CudaDevice
from tests.gpu.device_engine import allocate

wanted, nbytes = np.random.default_rng(1).integers(0, {COUNT}, 100).tolist(), 4 * {WIDTH}
device, memory = CudaDevice(0), np.frombuffer(mmap.mmap(-1, 1 << 20), np.float32)
out = memory[: 100 * {WIDTH}].reshape(100, {WIDTH})
pool = allocate(device, 2 << 20)
with open_objects(sys.argv[1]) as store:
    table = Table(store.map("rows"))
    with table.registered(device) as rows, device.current():
        device.register(out.ctypes.data, memory.nbytes)
        stream = device.stream()
        device.copy(Runs.of((pool + at * nbytes, rows + row * nbytes, nbytes) for at, row in enumerate(wanted)),
                    "to device", stream)
        device.copy(Runs.of([(out.ctypes.data, pool, out.nbytes)]), "to host", stream)
        device.synchronize(stream)
        device.unregister(out.ctypes.data)
    assert np.array_equal(out, table.gather(wanted)), "other rows came back"
"""


def test_rows_are_copied_to_a_device_from_the_mapping(tmp_path: Path) -> None:
    calls, copies = tmp_path / "calls", tmp_path / "copies"
    variables = emulated_node(copies=copies, trace=calls, must_emulate=True)
    rows = np.random.default_rng(0).standard_normal((COUNT, WIDTH)).astype(np.float32)
    with running_daemon() as daemon:
        with open_objects(daemon.socket_dir, staging_bytes=2 << 20) as store:
            store.put("rows", array_source(rows))
        command = [sys.executable, "-c", GATHER, str(daemon.socket_dir)]
        done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    named = calls.read_text().split()
    assert [each for each in named if each.startswith("cuMemHost")] == [
        "cuMemHostRegister", "cuMemHostGetDevicePointer", "cuMemHostRegister", *["cuMemHostUnregister"] * 2,
    ]  # fmt: skip
    assert all("kvstore-arena" in line for line in copies.read_text().splitlines() if line.startswith("in"))
