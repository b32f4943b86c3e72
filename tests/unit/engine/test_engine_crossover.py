"""Attention becomes one pass: what is made of measured times, what is remembered, and what the setting says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_cuda.compiler import Program
from kvstore_engine.errors import UsageError
from kvstore_engine.executors import DeviceName, PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.kernels.cuda.attention import AttentionCrossover, PagedAttention
from kvstore_engine.kernels.cuda.crossover import VARIABLE, measured, pass_ratios, settled
from kvstore_engine.kernels.cuda.program import STREAM_OF_DEFAULT, CacheShape, CudaError, Launcher
from tests.cuda_shim.launcher import placed
from tests.reference.make_gguf import TinyModel, write_model
from tests.reference.nvrtc import need_nvrtc
from tests.reference.skips import skip_without_ggml

SHAPE, BLOCKS, ROWS = CacheShape(32, 8, 128, 16), 40, (1, 2, 4, 8, 16)


class ModelledDevice(Launcher):
    """Runs nothing. A thread block takes a second for each partition of its keys; `at_once` of them run at once."""

    multiprocessors, architecture, name = 32, "sm_90", "modelled"

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._took_s = 0.0
        self.streams: set[int] = set()
        self.planes: set[tuple[int, int]] = set()
        self.rows: set[int] = set()

    def launch(
        self, program: Program, kernel: str, grid: tuple[int, int, int], argument: Any,
        *, shared_bytes: int = 0, stream: int = STREAM_OF_DEFAULT,
    ) -> None:  # fmt: skip
        self.streams.add(stream)
        self.rows.add(grid[0])
        self.planes.add((argument.keys, argument.values))
        if kernel == "kv_merge_partitions":
            self._took_s += 0.5
        else:
            seconds_each = 1 if kernel.endswith("v2") else 8
            self._took_s += seconds_each * -(-grid[0] * grid[1] * grid[2] // self._at_once)

    def seconds(self, queue: Callable[[int], object]) -> float:
        self._took_s = 0.0
        queue(7)
        return self._took_s


def found(device: ModelledDevice, placed_arrays: list[npt.NDArray[np.generic]] | None = None) -> PagedAttention:
    """Attention with the crossover that is measured on `device`, in contexts of eight partitions."""
    kept = [] if placed_arrays is None else placed_arrays

    def place(array: npt.NDArray[np.generic]) -> int:
        kept.append(placed(array))
        return int(kept[-1].ctypes.data)

    attention = PagedAttention(device, SHAPE)
    ratios = pass_ratios(attention, (16, 16), place, device.seconds, blocks=BLOCKS, rows=ROWS)
    assert list(ratios) == list(ROWS)
    return PagedAttention(device, SHAPE, crossover=measured(attention, ratios))


@pytest.mark.parametrize(
    ("at_once", "from_rows"),
    [
        (4, 1),  # a row of 8 thread blocks fills the device
        (16, 2),
        (64, 8),
        (1 << 20, 32),  # partitions win with the most rows, too: one pass is for twice as many
    ],
)
def test_one_pass_is_chosen_from_where_it_was_measured_to_be_no_slower(at_once: int, from_rows: int) -> None:
    attention = found(ModelledDevice(at_once))
    chosen = {rows: attention.version(rows, 4096) for rows in (*ROWS, 32, 64)}
    assert chosen == {rows: 1 if rows >= from_rows else 2 for rows in chosen}


def test_one_slow_time_among_few_rows_does_not_make_partitions_the_choice_of_many() -> None:
    attention = PagedAttention(ModelledDevice(4), SHAPE)
    assert measured(attention, {1: 0.9, 2: 1.3, 4: 0.9, 8: 0.9}) == AttentionCrossover(1.0), (
        "8 thread blocks each, of 4 rows"
    )


def test_the_pool_is_read_within_its_blocks_and_on_the_stream_that_is_timed() -> None:
    device, arrays = ModelledDevice(64), list[npt.NDArray[np.generic]]()
    found(device, arrays)
    (tables,) = [array for array in arrays if array.ndim == 2]
    assert tables.shape == (ROWS[-1], 4096 // 16)
    assert set(tables.ravel().tolist()) == set(range(BLOCKS))
    assert device.streams == {7}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    need_nvrtc()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    return tmp_path / "kvstored" / "kernels"


class Measured:
    """Counts what is measured."""

    def __init__(self, *values: float) -> None:
        self._values = list(values)

    def __call__(self) -> AttentionCrossover:
        return AttentionCrossover(self._values.pop(0))

    @property
    def left(self) -> int:
        return len(self._values)


def test_what_was_measured_is_remembered_for_the_kind_of_device_and_the_program(folder: Path) -> None:
    device, measure = ModelledDevice(4), Measured(1.5, 0.25, 3.0, 4.0)
    bf16, fp8 = PagedAttention(device, SHAPE), PagedAttention(device, CacheShape(32, 8, 128, 16, cache="fp8"))
    for _ in range(2):
        assert settled(bf16, "sm_90", "H100, 132", measure) == AttentionCrossover(1.5)
    for _ in range(2):
        assert settled(bf16, "sm_90", "H200, 132", measure) == AttentionCrossover(0.25)
        assert settled(bf16, "sm_80", "H100, 132", measure) == AttentionCrossover(3.0)
        assert settled(fp8, "sm_90", "H100, 132", measure) == AttentionCrossover(4.0)
    assert len(list(folder.iterdir())) == 4


def test_the_executor_measures_on_its_own_planes_before_they_are_used(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="needs the extra torch")
    from kvstore_engine.torch_executor.attention import crossover_on
    from kvstore_engine.torch_executor.model import TorchModel
    from kvstore_engine.torch_executor.opening import new_pool

    skip_without_ggml()
    path = write_model(tmp_path / "m.gguf", TinyModel(heads=8, kv_heads=8))
    device: Any = ModelledDevice(64)
    with contextlib.closing(TorchModel(GGUFFile.open(path), DeviceName.parse("torch:cpu"), 160)) as model:
        pool, cache = new_pool(model, PoolSetup(BLOCKS, 16, "bf16"), StepSizes(threads=1, max_context=160))
        assert crossover_on(device, cache) == AttentionCrossover(2.0), "from 8 rows on, each of 8 thread blocks"
        assert len(list(folder.iterdir())) == 1
        addresses = pool.plane_addresses(0)
    assert device.planes == {addresses}
    assert max(device.rows) == 64


@pytest.mark.parametrize("damage", [b"", b"nan", b"-1", b"inf", b"\xff"])
def test_a_file_that_was_damaged_is_measured_anew(folder: Path, damage: bytes) -> None:
    attention, measure = PagedAttention(ModelledDevice(4), SHAPE), Measured(1.5, 2.5)
    settled(attention, "sm_90", "H100", measure)
    (file,) = folder.iterdir()
    file.write_bytes(damage)
    assert settled(attention, "sm_90", "H100", measure) == AttentionCrossover(2.5)
    assert file.read_bytes() == b"2.5"


@pytest.mark.parametrize("error", [CudaError("cuGraphInstantiate: no memory"), RuntimeError("CUDA out of memory")])
def test_the_default_holds_for_this_process_where_nothing_can_be_measured(folder: Path, error: Exception) -> None:
    def fails() -> AttentionCrossover:
        raise error

    attention = PagedAttention(ModelledDevice(4), SHAPE)
    assert settled(attention, "sm_90", "H100", fails) == AttentionCrossover() == AttentionCrossover(2.0)
    assert settled(attention, "sm_90", "H100", Measured(1.5)) == AttentionCrossover(1.5)


@pytest.mark.parametrize(("said", "version"), [("0", 1), ("0.5", 2), ("1e9", 2)])
def test_the_setting_is_taken_instead_of_a_measurement(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, version: int
) -> None:
    device, measure = ModelledDevice(4), Measured(1.5)
    settled(PagedAttention(device, SHAPE), "sm_90", "H100", measure)
    monkeypatch.setenv(VARIABLE, said)
    crossover = settled(PagedAttention(device, SHAPE), "sm_90", "H100", measure)
    assert crossover == AttentionCrossover(float(said)) and measure.left == 0
    assert PagedAttention(device, SHAPE, crossover=crossover).version(1, 4096) == version


@pytest.mark.parametrize("said", ["much", "-1", "nan", "inf"])
def test_a_setting_that_is_no_number_of_thread_blocks_is_refused(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.setenv(VARIABLE, said)
    with pytest.raises(UsageError, match=f"{VARIABLE} must be a number of thread blocks"):
        settled(PagedAttention(ModelledDevice(4), SHAPE), "sm_90", "H100", Measured())
