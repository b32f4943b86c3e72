"""The C++ kernels as each compiler of this machine builds them."""

from __future__ import annotations

from functools import cache
from typing import Literal
from unittest import mock

import pytest

from kvstore_engine.kernels.build import build_kernels
from kvstore_engine.kernels.selection import NativeKernels

Compiler = Literal["system", "zig"]


@cache
def native_kernels(compiler: Compiler, isa: str | None = None) -> NativeKernels:
    """Return the kernels for `isa`, or the best. Skips the test where the wheel ziglang is not installed."""
    if compiler == "system":
        return NativeKernels(build_kernels(), isa)
    pytest.importorskip("ziglang")
    with mock.patch("shutil.which", return_value=None):
        return NativeKernels(build_kernels(), isa)
