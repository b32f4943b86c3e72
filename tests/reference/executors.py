"""The executors that are held to their contract, how each is opened, and how far its sums may round.

`rounding`: the root mean square that logits may be off by, of their spread. `is_exact`: a row's bits depend on no
other row of its step (but for f16 matrices, of which ggml multiplies single rows otherwise). `kv_noise`: types of K and
V, and what each may cost against f32, of four times the spread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.executors import DeviceName, PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.opening import open_executor
from tests.reference.skips import skip_without_ggml

Opens = Callable[[Path, PoolSetup, StepSizes], contextlib.AbstractContextManager[StepExecutor]]


@dataclass(frozen=True)
class TriedExecutor:
    name: str
    opens: Opens
    rounding: float
    is_exact: bool
    kv_noise: Mapping[str, float] = field(default_factory=dict)

    def need(self) -> None:
        """Skip the test where it cannot run."""
        skip_without_ggml()  # it reads the weights for torch too
        if self is not GGML:
            pytest.importorskip("torch", reason="needs the extra torch")

    def __str__(self) -> str:
        return self.name


def _on(device: str) -> Opens:
    def opens(path: Path, setup: PoolSetup, sizes: StepSizes) -> contextlib.AbstractContextManager[StepExecutor]:
        return open_executor(GGUFFile.open(path), DeviceName.parse(device), setup, sizes)

    return opens


@contextlib.contextmanager
def _with_our_kernels(path: Path, setup: PoolSetup, sizes: StepSizes) -> Iterator[StepExecutor]:
    """torch's executor as on a GPU: padded steps, and the kernels' source compiled for the host."""
    from kvstore_engine.torch_executor.attention import KernelAttention
    from kvstore_engine.torch_executor.executor import TorchExecutor
    from kvstore_engine.torch_executor.model import TorchModel
    from kvstore_engine.torch_executor.opening import new_pool
    from tests.cuda_shim.launcher import ShimLauncher

    model = TorchModel(GGUFFile.open(path), DeviceName.parse("torch:cpu"), sizes.max_context)
    launcher = ShimLauncher()
    pool, cache = new_pool(model, setup, sizes, launcher)
    attention: Any = KernelAttention(cache, launcher, lambda: 0)
    with contextlib.closing(model), TorchExecutor(model, pool, attention, sizes) as executor:
        yield executor


_TORCH_NOISE = {"f16": 1e-2, "bf16": 2e-2, "int8": 4e-2, "fp8": 6e-2}
GGML = TriedExecutor("ggml", _on("cpu"), 0.005, True, {"f16": 2e-3, "bf16": 2e-2, "q8_0": 2e-2, "q4_0": 0.4})
TORCH = TriedExecutor("torch", _on("torch:cpu"), 0.03, False, _TORCH_NOISE)
KERNELS = TriedExecutor("torch-kernels", _with_our_kernels, 0.03, False, _TORCH_NOISE)
