"""Says whether CUDA kernels can be compiled here."""

from __future__ import annotations

import pytest

from kvstore_cuda import nvrtc
from kvstore_cuda.nvrtc import CompileError


def need_nvrtc() -> None:
    """Skips the test where they cannot."""
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install '.[cuda]'")
    try:
        nvrtc.library()
    except CompileError as error:
        pytest.skip(f"no NVRTC: {error}")
