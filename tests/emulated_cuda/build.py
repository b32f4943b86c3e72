"""Builds the emulated driver, once for each state of its sources. Owns the place of the library."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def driver_directory() -> Path:
    """The directory with `libcuda.so.1` in it. Skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler (cc): the emulated CUDA driver cannot be built")
    sources = sorted(HERE.glob("*.[ch]"))
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]
    place = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}-{digest}"
    if not (place / "libcuda.so.1").exists():
        scratch = Path(tempfile.mkdtemp(prefix="emulated-cuda-"))
        built = scratch / "libcuda.so.1"
        options = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-fPIC", "-shared"]
        files = [str(source) for source in sources if source.suffix == ".c"]
        options.append("-U_FORTIFY_SOURCE")  # a kernel that faults is left by a jump to another stack
        subprocess.run([compiler, *options, "-pthread", "-Wl,-soname,libcuda.so.1", "-o", built, *files], check=True)
        place.mkdir(mode=0o700, exist_ok=True)
        os.replace(built, place / "libcuda.so.1")
        scratch.rmdir()
    return place
