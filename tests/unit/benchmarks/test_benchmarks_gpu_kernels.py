"""The questions about CUDA kernels, asked of the device on the host: what they compute, and how they judge times."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_engine.kernels.cuda.program import SOURCES
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

    def __init__(
        self, times_s: list[float] | None = None, copied_bytes_s: float = 1e12,
        *, steps_s: list[list[float]] | None = None, batches_s: list[float] | None = None,
    ) -> None:  # fmt: skip
        self.launcher = ShimLauncher(multiprocessors=16)
        self._arrays: dict[int, Array] = {}
        self._times_s, self._copied_bytes_s = times_s or [], copied_bytes_s
        self._steps_s, self._batches_s = steps_s or [], batches_s or []
        self.batches: list[list[tuple[int, int, int]]] = []
        self.transfers: list[str] = []  # whose, in order

    def place(self, array: Array) -> int:
        copied = placed(array)
        self._arrays[copied.ctypes.data] = copied
        return copied.ctypes.data

    def place_on_host(self, array: Array) -> int:
        return self.place(array)

    def repeated(self, array: Array, nbytes: int) -> int:
        return self.place(np.resize(array.view(np.uint8), nbytes))

    def read(self, address: int, like: Array) -> Array:
        return self._arrays[address].view(like.dtype).reshape(like.shape)

    def seconds(self, queue: Callable[[], Any], *, in_graph: bool = True) -> float:
        queue()
        return self._times_s.pop(0)

    def steps(self, queue: Callable[[], Any], launches: int, count: int) -> list[float]:
        for _ in range(launches):
            queue()
        return self._steps_s.pop(0)

    def batch_s(self, runs: list[tuple[int, int, int]], *, to_device: bool) -> float:
        self.batches.append(runs)
        return self._batches_s.pop(0)

    def copied_bytes_s(self) -> float:
        return self._copied_bytes_s

    @contextmanager
    def saturated(self, *, by_process: bool) -> Iterator[Callable[[], float]]:
        self.transfers.append("worker" if by_process else "client")
        yield lambda: 50e9

    @contextmanager
    def stored(self) -> Iterator[Callable[[], float]]:
        self.transfers.append("stores")
        yield lambda: 12.5e9


@pytest.mark.slow
def test_errors_are_within_what_is_promised() -> None:
    answer = kernels().errors(HostCard(), contexts=(1, 40, 130, 700))
    assert answer.holds, answer.says
    assert answer.says.startswith("error against float64: bf16 ")


@pytest.mark.slow
def test_decode_is_judged_by_the_bytes_that_it_reads() -> None:
    read = 2 * 2 * 32 * 8 * 128 * 2  # K and V, two sequences of 32 tokens, 8 heads of 128 channels of 2 bytes
    card = HostCard([1e-3, 0.5e-3], copied_bytes_s=read / 0.85e-3)
    answer = kernels().decode_of_a_batch(card, batch=2, context=32)
    assert answer.holds and "V1: 0.85x of a copy (promised 0.8); int8 2.00x of bf16" in answer.says
    assert "bf16 1000.0 us, 0.3 GB/s; the copy 0.3 GB/s; int8 500.0 us, 0.3 GB/s" in answer.says
    assert answer.figures["bf16 us"] == pytest.approx(1000) and answer.figures["int8 us"] == pytest.approx(500)
    answer = kernels().decode_of_a_batch(HostCard([1e-3, 0.9e-3], read / 0.85e-3), batch=2, context=32)
    assert not answer.holds and "int8 1.11x" in answer.says, "int8 is to be 1.3 times as fast"
    answer = kernels().decode_of_one(HostCard([1e-3], read / 2 / 0.5e-3), context=32)
    assert not answer.holds and "V2: 0.50x of a copy (promised 0.6)" in answer.says


@pytest.mark.slow
def test_the_crossover_is_where_one_pass_becomes_as_fast() -> None:
    """8 thread blocks a sequence, 16 multiprocessors: four sequences are two for each, as the default has it."""
    answer = kernels().crossover(HostCard([2.0, 1.0, 1.2, 1.0, 0.9, 1.0]), batches=(1, 2, 4), context=16)
    assert answer.holds and "(1: 2.00x, 2: 1.20x, 4: 0.90x): V1 from 2.0 blocks" in answer.says
    assert answer.figures["2, V1 us"] == pytest.approx(1.2e6) and answer.figures["2, V2 us"] == pytest.approx(1e6)
    answer = kernels().crossover(HostCard([2.0, 1.0]), batches=(1,), context=16)
    assert not answer.holds and "V1 from inf" in answer.says


@pytest.mark.slow
def test_every_kernel_is_launched_for_the_tools_and_checked() -> None:
    from support import gpu_launches

    card = HostCard()
    gpu_launches.launch_all(card)
    in_sources = {
        name for path in SOURCES.glob("*.cu") for name in re.findall(r"__global__ .*? (kv_\w+)\(", path.read_text())
    }
    assert set(card.launcher.launched) == in_sources
    wrong = HostCard()
    wrong.read = lambda address, like: np.zeros_like(like)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="wrong"):
        gpu_launches._move_blocks(wrong)


@pytest.mark.slow
def test_a_step_is_judged_beside_a_transfer() -> None:
    from support.gpu_rivals import decode_beside_transfer

    card = HostCard(steps_s=[[1e-3] * 4, [1.02e-3, 1e-3, 1e-3, 3e-3], [1.04e-3] * 4, [1.01e-3] * 4])
    answer = decode_beside_transfer(card, batch=1, context=16, layers=2, steps=4)
    assert answer.holds and "a client's copies (50.0 GB/s) p50 1.00x, p99 3.00x" in answer.says
    assert "a client's stores within their budget (12.5 GB/s) p50 1.01x" in answer.says
    assert card.transfers == ["client", "worker", "stores"]
    for slow in (1, 2):
        beside_s = [[1.06e-3 if at == slow else 1e-3] for at in range(3)]
        card = HostCard(steps_s=[[1e-3], *beside_s])
        assert not decode_beside_transfer(card, batch=1, context=16, layers=2, steps=1).holds


@pytest.mark.slow
def test_the_gather_kernel_is_compared_by_size_and_its_bytes_are() -> None:
    from support.gpu_kernels import gather_against_batch

    card = HostCard([1.0, 4.0, 1.0, 1.0], batches_s=[2.0, 2.0, 2.0, 0.5])
    answer = gather_against_batch(card, (64, 128), 512)
    assert "host to pool 0 KiB 2.00x (1000000.0 us, 0.0 GB/s; batch 2000000.0 us" in answer.says
    assert (
        answer.figures["host to pool, crossover bytes"] == 64 and answer.figures["pool to host, crossover bytes"] == 64
    )
    assert all(sum(run[2] for run in batch) == 512 for batch in card.batches)
    card = HostCard([1.0] * 2, batches_s=[1.0] * 2)
    card.launcher.launch = lambda *_, **__: None
    with pytest.raises(RuntimeError, match="moved pieces of 64 bytes wrong"):
        gather_against_batch(card, (64,), 512)


@pytest.mark.slow
def test_rivals_are_asked_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install '.[transformers]'")
    from support.gpu_rivals import TOGETHER, decode_of_rivals

    for absent in ("flashinfer", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, absent, None)
    answer = decode_of_rivals(HostCard([1e-3]), batch=2, context=32, torch_device="cpu")
    assert answer.holds is None and "FlashInfer: not installed" in answer.says and TOGETHER in answer.figures
    monkeypatch.setitem(sys.modules, "flashinfer", PagedRival(torch))
    assert decode_of_rivals(HostCard([1e-9]), batch=2, context=32, torch_device="cpu").holds
    assert decode_of_rivals(HostCard([1e9]), batch=2, context=32, torch_device="cpu").holds is False


class PagedRival(ModuleType):
    """The part of FlashInfer that is called, over torch, as strict about shapes as the documentation is."""

    def __init__(self, torch: ModuleType) -> None:
        super().__init__("flashinfer")
        self.torch = torch
        self.BatchDecodeWithPagedKVCacheWrapper = self._wrapper

    def _wrapper(self, workspace: Any, layout: str, *, use_tensor_cores: bool) -> PagedRival:
        assert (workspace.dtype, layout) == (self.torch.uint8, "NHD")
        return self

    def plan(
        self,
        starts: Any,
        pages: Any,
        last: Any,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        page: int,
        **types: Any,
    ) -> None:
        assert starts.dtype == pages.dtype == last.dtype == self.torch.int32 and set(types) == {
            "q_data_type",
            "kv_data_type",
        }
        assert len(pages) == starts[-1] and len(last) == len(starts) - 1 and int(last.max()) <= page
        self.shape = (query_heads, kv_heads, head_dim, page)

    def run(self, queries: Any, planes: tuple[Any, Any]) -> None:
        query_heads, kv_heads, head_dim, page = self.shape
        assert queries.shape[1:] == (query_heads, head_dim)
        assert all(plane.shape[1:] == (page, kv_heads, head_dim) for plane in planes)


def test_without_a_gpu_the_check_fails_and_says_why() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install '.[gpu]'")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    run = subprocess.run([sys.executable, str(BENCHMARKS / "gpu_check.py")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 2
    assert run.stderr.startswith("gpu-check: ") and "Traceback" not in run.stderr
