"""The questions about CUDA kernels, asked of the device on the host: what they compute, and how they judge times."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.cuda_shim.launcher import ShimLauncher, placed
from tests.reference.benchmark_scripts import BENCHMARKS, importable

Array = npt.NDArray[np.generic]


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def kernels() -> ModuleType:
    from support import gpu_kernels

    return gpu_kernels


class HostCard:
    """A `Card` whose launches take the times that a test gives, in turn, and run when there are none."""

    stream = 0

    def __init__(self, times_s: list[float] | None = None, copied_bytes_s: float = 1e12) -> None:
        self.launcher = ShimLauncher(multiprocessors=16)
        self._arrays: dict[int, Array] = {}
        self._times_s, self._copied_bytes_s = times_s or [], copied_bytes_s

    def place(self, array: Array) -> int:
        copied = placed(array)
        self._arrays[copied.ctypes.data] = copied
        return copied.ctypes.data

    def repeated(self, array: Array, nbytes: int) -> int:
        return self.place(np.resize(array.view(np.uint8), nbytes))

    def read(self, address: int, like: Array) -> Array:
        return self._arrays[address].view(like.dtype).reshape(like.shape)

    def seconds(self, queue: Callable[[], Any]) -> float:
        queue()
        return self._times_s.pop(0)

    def copied_bytes_s(self) -> float:
        return self._copied_bytes_s


@pytest.mark.slow
def test_errors_are_within_what_is_promised() -> None:
    holds, says = kernels().errors(HostCard(), contexts=(1, 40, 130, 700))
    assert holds, says
    assert says.startswith("error against float64: bf16 ")


@pytest.mark.slow
def test_decode_is_judged_by_the_bytes_that_it_reads() -> None:
    read = 2 * 2 * 32 * 8 * 128 * 2  # K and V, two sequences of 32 tokens, 8 heads of 128 channels of 2 bytes
    card = HostCard([1e-3, 0.5e-3], copied_bytes_s=read / 0.85e-3)
    holds, says = kernels().decode_of_a_batch(card, batch=2, context=32)
    assert holds and "V1: 0.85x of a copy (promised 0.8); int8 2.00x of bf16" in says
    holds, says = kernels().decode_of_a_batch(HostCard([1e-3, 0.9e-3], read / 0.85e-3), batch=2, context=32)
    assert not holds and "int8 1.11x" in says, "int8 is to be 1.3 times as fast"
    holds, says = kernels().decode_of_one(HostCard([1e-3], read / 2 / 0.5e-3), context=32)
    assert not holds and "V2: 0.50x of a copy (promised 0.6)" in says


@pytest.mark.slow
def test_the_crossover_is_where_one_pass_becomes_as_fast() -> None:
    """8 thread blocks a sequence, 16 multiprocessors: four sequences are two for each, as the default has it."""
    holds, says = kernels().crossover(HostCard([2.0, 1.0, 1.2, 1.0, 0.9, 1.0]), batches=(1, 2, 4), context=16)
    assert holds and "(1: 2.00x, 2: 1.20x, 4: 0.90x): V1 from 2.0 blocks" in says
    holds, says = kernels().crossover(HostCard([2.0, 1.0]), batches=(1,), context=16)
    assert not holds and "V1 from inf" in says


def test_without_a_gpu_the_check_fails_and_says_why() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install 'kvstored[gpu]'")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    run = subprocess.run([sys.executable, str(BENCHMARKS / "gpu_check.py")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("gpu-check: ") and "Traceback" not in run.stderr
