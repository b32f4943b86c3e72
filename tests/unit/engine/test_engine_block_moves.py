"""Planes in torch's memory: our kernels move blocks as torch does, in and out of host memory and within; and who copies
where there is no device that could.
"""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch", reason="needs the extra torch")

from kvstore_engine.devices import DeviceName
from kvstore_engine.restore.copies import HostPoolCopies
from kvstore_engine.torch_executor import open_torch_copies
from kvstore_engine.torch_executor.cache import Arrivals
from kvstore_engine.torch_executor.planes import TorchPlanes
from tests.cuda_shim.launcher import ShimLauncher
from tests.reference.twin_compute import twin_pool

PLANES, BLOCKS = 4, 12
CPU = DeviceName.parse("torch:cpu")
F16, INT8 = 1024, 16 * 2 * (16 + 4)  # bytes of a block: int8 has its scales behind the elements


def _planes(block_bytes: int, launcher: ShimLauncher | None) -> TorchPlanes:
    planes = TorchPlanes(PLANES, BLOCKS, block_bytes, device=CPU, launcher=launcher)
    content = np.random.default_rng(1).integers(0, 256, planes.array.shape, np.uint8)
    planes.array[:] = content
    return planes


def _used(planes: TorchPlanes, block_bytes: int) -> tuple[npt.NDArray[np.uint8], list[npt.NDArray[np.uint8]]]:
    """The planes after all that a pool does to them, and what was copied out between."""
    tables = np.array([[7, 8, 3], [0, 1, 2]], np.int32)
    out = [np.empty(PLANES * 3 * block_bytes, np.uint8) for _ in tables]
    planes.copy_blocks(out, tables, into_pool=False, threads=1)
    planes.copy_blocks(out[::-1], np.array([[4, 5, 6], [9, 11, 10]], np.int32), into_pool=True, threads=1)
    planes.write_part(out[0].reshape(PLANES, 3, block_bytes)[:, 1:], np.array([2, 0], np.int32))
    planes.move_blocks(np.array([4, 5, 9], np.int32), np.array([7, 8, 1], np.int32))
    return planes.array, out


@pytest.mark.parametrize("block_bytes", [F16, INT8])
def test_our_kernels_move_blocks_as_torch_does(block_bytes: int) -> None:
    launcher = ShimLauncher()
    array, out = _used(_planes(block_bytes, launcher), block_bytes)
    expected, others = _used(_planes(block_bytes, None), block_bytes)
    np.testing.assert_array_equal(out, others)
    np.testing.assert_array_equal(array, expected)
    assert set(launcher.launched) == {"kv_gather_blocks", "kv_scatter_blocks", "kv_move_blocks"}


def test_a_move_is_one_launch_for_all_planes() -> None:
    launcher = ShimLauncher()
    _planes(F16, launcher).move_blocks(np.array([1, 2, 3], np.int32), np.array([5, 6, 9], np.int32))
    assert launcher.launched == ["kv_move_blocks"]


@pytest.mark.parametrize(
    ("missing", "reason"),
    [(True, r"the library cuda-bindings is missing: pip install '.\[gpu\]'"), (False, "CUDA device 3")],
)
def test_without_a_device_that_copies_the_host_does_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: bool, reason: str
) -> None:
    if missing:
        monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    model = SimpleNamespace(device=DeviceName.parse("cuda:3"))
    executor: Any = SimpleNamespace(model=model, pool=twin_pool(8), arrivals=Arrivals(1))
    with open_torch_copies(executor) as copies:
        assert isinstance(copies, HostPoolCopies) and copies.device is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "blocks are copied through host memory: CUDA device 3 makes no copies" in record.message
    assert re.search(reason, record.message)


def test_nothing_is_asked_of_a_driver_where_the_processor_computes(caplog: pytest.LogCaptureFixture) -> None:
    executor: Any = SimpleNamespace(model=SimpleNamespace(device=CPU), pool=twin_pool(8), arrivals=Arrivals(1))
    with open_torch_copies(executor) as copies:
        assert isinstance(copies, HostPoolCopies) and not caplog.records


def test_a_recorded_step_waits_for_all_layers_before_it_and_never_again() -> None:
    class Load:
        def __init__(self) -> None:
            self.waited: list[int] = []

        def wait(self, layer: int) -> None:
            self.waited.append(layer)

    arrivals, first, second = Arrivals(3), Load(), Load()
    arrivals.add(first.wait)
    arrivals.wait(0)
    arrivals.wait_all()
    arrivals.wait(0)
    assert first.waited == [0, 0, 1, 2]
    arrivals.add(second.wait)
    arrivals.wait(1)
    arrivals.remove(second.wait)
    arrivals.remove(first.wait)
    arrivals.wait(2)
    assert (first.waited, second.waited) == ([0, 0, 1, 2], [1])
