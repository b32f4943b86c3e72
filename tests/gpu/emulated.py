"""A machine with two emulated GPUs of its own for a test: the environment of its workers."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore_client.device import crossover
from kvstore_cuda.compiler import Program, compile_program
from kvstore_cuda.nvrtc import CompileError
from kvstore_tiers.gpu.streams import PROGRAM
from tests.cuda_shim.build import shim_library
from tests.emulated_cuda.build import driver_directory

_NODES = itertools.count()
_ORDERS = frozenset(("EMULATED_CUDA_FAULTS", "EMULATED_CUDA_READ_ONLY_REGISTER"))


def compiled(program: Program) -> bytes:
    """The cubin for the emulated devices, kept for processes that find their driver: NVRTC crashes there. Raises
    CompileError."""
    return compile_program(program, "sm_90")


class HostCopy(NamedTuple):
    """A copy from or to host memory, as the emulated driver noted it. `file`: what that memory is of."""

    to_device: bool
    nbytes: int
    file: str


def host_copies(log: Path) -> list[HostCopy]:
    """Return what was noted in the file that `emulated_node` was given, in order."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [HostCopy(way == "in", int(nbytes), file) for way, nbytes, file in lines]


def is_hardware() -> bool:
    """Return whether the driver is this machine's (`make gpu-check`)."""
    return os.environ.get("KVSTORED_TEST_GPU") == "hardware"


def need_what_it_is_told(variables: Mapping[str, str]) -> None:
    """Skips the test where `variables` order what a driver of hardware does not hear."""
    if is_hardware() and not _ORDERS.isdisjoint(variables):
        pytest.skip("needs the emulated driver: failures on demand")


def emulated_node(
    memory_bytes: int = 64 << 20,
    control: Path | None = None,
    *,
    must_emulate: bool = False,
    copies: Path | None = None,
    trace: Path | None = None,
) -> dict[str, str]:
    """Skips the test where the library of the GPU tier or a compiler is missing. With KVSTORED_TEST_GPU=hardware (`make
    gpu-check`) this machine's driver is used, and tests that need the emulated one are skipped. `control` orders
    failures, `copies` is where copies are noted (`host_copies`).
    """
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install '.[gpu]'")
    if is_hardware():
        if must_emulate or control is not None or copies is not None:
            pytest.skip("needs the emulated driver: failures on demand, notes, or devices that are as it says")
        return {}
    with contextlib.suppress(CompileError):
        compiled(PROGRAM)
    variables = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, (str(driver_directory()), os.environ.get("LD_LIBRARY_PATH")))),
        "EMULATED_CUDA_NODE": f"tier{os.getpid()}-{next(_NODES)}",
        "EMULATED_CUDA_KERNELS": str(shim_library(PROGRAM)),
        "EMULATED_CUDA_MEMORY": str(memory_bytes),
        crossover.VARIABLE: "0",  # what it would measure here says nothing
    }
    files = {"EMULATED_CUDA_CONTROL": control, "EMULATED_CUDA_COPIES": copies, "EMULATED_CUDA_TRACE": trace}
    return variables | {name: str(path) for name, path in files.items() if path is not None}
