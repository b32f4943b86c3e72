"""The NEON build of the attention kernel, run on an emulated processor, against this machine's own build."""

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvstore_cuda.native_build import AVX2, FLAGS
from kvstore_engine.kernels import build

_KERNELS = Path(build.__file__).parent
_PROBE = Path(__file__).parents[2] / "reference" / "attention_probe.cpp"
_CROSS, _EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
_NATIVE_FLAGS = {"x86_64": AVX2, "aarch64": ()}
_TIMEOUT_S = 300


def _output(folder: Path, compiler: str, flags: tuple[str, ...], *runner: str) -> npt.NDArray[np.float32]:
    program = folder / "probe"
    sources = (str(_KERNELS / "paged_attention.cpp"), str(_PROBE))
    command = [compiler, *FLAGS, *flags, "-DKV_ATTENTION=probed", f"-I{_KERNELS}", "-static", "-o", str(program)]
    subprocess.run([*command, *sources], check=True, timeout=_TIMEOUT_S)
    done = subprocess.run([*runner, str(program)], check=True, capture_output=True, timeout=_TIMEOUT_S)
    return np.frombuffer(done.stdout, np.float32)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in _NATIVE_FLAGS, reason="compares with AVX2 or NEON")
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.skipif(not shutil.which(_CROSS), reason=f"needs {_CROSS} (package g++-aarch64-linux-gnu)")
@pytest.mark.skipif(not shutil.which(_EMULATOR), reason=f"needs {_EMULATOR} (package qemu-user)")
def test_neon_gives_the_same_bits(tmp_path: Path) -> None:
    if platform.machine() == "x86_64" and "avx2" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this machine has no AVX2")
    folders = [tmp_path / name for name in ("here", "there")]
    for folder in folders:
        folder.mkdir()
    here = _output(folders[0], "g++", _NATIVE_FLAGS[platform.machine()])
    there = _output(folders[1], _CROSS, (), _EMULATOR)
    assert np.isfinite(here).all() and np.ptp(here) > 1
    np.testing.assert_array_equal(there, here)
