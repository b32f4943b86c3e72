"""A machine with two emulated GPUs of its own for a test: the environment of its workers."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from tests.emulated_cuda.build import driver_directory

_NODES = itertools.count()


def emulated_node(memory_bytes: int = 64 << 20, control: Path | None = None) -> dict[str, str]:
    """Skips the test where the library of the GPU tier or a compiler is missing."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install 'kvstored[gpu]'")
    variables = {
        "LD_LIBRARY_PATH": str(driver_directory()),
        "EMULATED_CUDA_NODE": f"tier{os.getpid()}-{next(_NODES)}",
        "EMULATED_CUDA_MEMORY": str(memory_bytes),
    }
    return variables | ({"EMULATED_CUDA_CONTROL": str(control)} if control is not None else {})
