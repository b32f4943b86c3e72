"""The CUDA kernels, compiled for real architectures by NVRTC, which needs no device; and what is said without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from kvstore_client.device import gather
from kvstore_cuda import compiler as cuda_compiler
from kvstore_cuda import kernel_cache, nvrtc
from kvstore_cuda.compiler import compile_program, compile_with_log, load_program
from kvstore_cuda.driver import DriverError
from kvstore_cuda.nvrtc import CompileError
from kvstore_engine.kernels.cuda.attention import PagedAttention
from kvstore_engine.kernels.cuda.blocks import BlockMover, BlockRuns
from kvstore_engine.kernels.cuda.device import Device
from kvstore_engine.kernels.cuda.program import SOURCES, CacheShape, CudaError, KernelProgram, address_of
from kvstore_engine.kernels.cuda.rope import RopeCache
from kvstore_tiers.gpu import streams
from tests.cuda_shim.launcher import ShimLauncher
from tests.reference.examples import each_nth
from tests.reference.nvrtc import need_nvrtc

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
SPILLS = re.compile(r"(\d+) bytes spill stores")
SHAPES = [
    CacheShape(32, 8, 128, 16, "bf16", "bf16"),
    CacheShape(64, 8, 128, 16, "bf16", "int8"),
    CacheShape(32, 8, 128, 64, "f16", "fp8"),
    CacheShape(16, 4, 256, 16, "bf16", "bf16"),
    CacheShape(8, 8, 64, 8, "f32", "f32"),
    CacheShape(10, 2, 80, 128, "f16", "f16"),
]
BLOCKS = KernelProgram.of("blocks.cu")


def must_compile_without_spilling(architecture: str, shapes: list[CacheShape]) -> None:
    """Compile every kernel, the attention kernels for each shape."""
    programs = [BLOCKS]
    for shape in shapes:
        programs += [PagedAttention(ShimLauncher(), shape).program, RopeCache(ShimLauncher(), shape).program]
    assert {program.source for program in programs} == {path.name for path in SOURCES.glob("*.cu")}
    for program in (*programs, streams.PROGRAM, gather.PROGRAM):
        cubin, log = compile_with_log(program, architecture, "--ptxas-options=-v")
        assert cubin.startswith(b"\x7fELF"), program
        assert SPILLS.findall(log) and set(SPILLS.findall(log)) == {"0"}, f"{program}\n{log}"


@pytest.mark.parametrize("architecture", each_nth(ARCHITECTURES, len(ARCHITECTURES)))
def test_every_kernel_compiles_for_one_shape(architecture: str) -> None:
    need_nvrtc()
    must_compile_without_spilling(architecture, SHAPES[:1])


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute of one processor, which may be shared
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_spilling_registers(architecture: str) -> None:
    need_nvrtc()
    must_compile_without_spilling(architecture, SHAPES)


@pytest.mark.slow
def test_keys_are_copied_asynchronously_where_the_device_can() -> None:
    need_nvrtc()
    program = PagedAttention(ShimLauncher(), SHAPES[0]).program
    text = [compile_with_log(program, architecture)[0] for architecture in ("compute_80", "compute_75")]
    assert [b"cp.async.cg.shared.global" in one for one in text] == [True, False]


def test_a_program_is_compiled_once(tmp_path: Path) -> None:
    need_nvrtc()
    assert compile_program(BLOCKS, "sm_90", tmp_path).startswith(b"\x7fELF")
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(b"from the cache")
    assert compile_program(BLOCKS, "sm_90", tmp_path) == b"from the cache"


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_no_result(tmp_path: Path) -> None:
    need_nvrtc()
    (tmp_path / "file").write_text("")
    assert compile_program(BLOCKS, "sm_90", tmp_path / "file" / "folder").startswith(b"\x7fELF")


def test_a_driver_that_is_too_old_for_the_kernels_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need_nvrtc()
    major, _ = nvrtc.call("nvrtcVersion")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def refuses(version: int, name: str, *arguments: object) -> int:
        if name == "cuModuleLoadData":
            raise DriverError(name, 200, "CUDA_ERROR_INVALID_IMAGE")
        return version

    too_old = rf"the driver, of CUDA {major - 1}\.8, cannot load kernels of NVRTC {major}\.\d+: "
    with pytest.raises(CompileError, match=too_old):
        load_program(partial(refuses, 1000 * (major - 1) + 80), BLOCKS, "sm_90")
    with pytest.raises(DriverError, match="INVALID_IMAGE"):
        load_program(partial(refuses, 1000 * major), BLOCKS, "sm_90")


def test_an_error_of_the_compiler_is_one_line() -> None:
    need_nvrtc()
    program = PagedAttention(ShimLauncher(), SHAPES[0]).program
    wrong = KernelProgram.of(program.source, **(dict(program.defines) | {"KV_SHARED_BYTES": "1"}))
    with pytest.raises(CompileError, match=r"^NVRTC cannot compile paged_attention.cu for sm_90: .*same") as caught:
        compile_with_log(wrong, "sm_90")
    assert "\n" not in str(caught.value)


def test_a_machine_without_the_library_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    nvrtc.library.cache_clear()
    try:
        with pytest.raises(CompileError, match=r"need the library cuda-bindings: pip install '.\[cuda\]'"):
            compile_program(BLOCKS, "sm_90", tmp_path)
        with pytest.raises(CudaError, match=r"need the library cuda-bindings"):
            Device()
    finally:
        nvrtc.library.cache_clear()


def test_a_machine_without_a_driver_or_device_says_so() -> None:
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed: pip install '.[cuda]'")
    if Path("/dev/nvidiactl").exists():
        pytest.skip("this machine has a GPU")
    # In a process of its own: one that has loaded an emulated driver finds that again.
    command = [sys.executable, "-c", "from kvstore_engine.kernels.cuda.device import Device; Device()"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "CudaError: " in ended.stderr
    assert re.search(r"is the NVIDIA driver installed\?|CUDA_ERROR", ended.stderr.splitlines()[-1])


def test_memory_is_named_by_torch_tensors_and_arrays() -> None:
    class Tensor:
        def data_ptr(self) -> int:
            return 4096

    class Array:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"data": (8192, False)}

    assert [address_of(memory) for memory in (Tensor(), Array(), 77)] == [4096, 8192, 77]
    with pytest.raises(TypeError, match="list is no device memory"):
        address_of([1])


def test_nothing_is_launched_for_no_work() -> None:
    launcher = ShimLauncher()
    runs = BlockRuns.within(np.zeros(0, np.int32), np.zeros(0, np.int32), 16)
    BlockMover(launcher).move(0, runs, (0, 0), plane_count=3)
    assert launcher.launched == []


def test_what_a_kept_file_is_named_after() -> None:
    need_nvrtc()
    other = KernelProgram.of(BLOCKS.source, THREADS="64")
    cases = [(BLOCKS, "sm_90"), (BLOCKS, "sm_80"), (other, "sm_90")]
    names = [cuda_compiler.program_digest(program, architecture) for program, architecture in cases]
    assert len({*names}) == 3
    assert cuda_compiler.program_digest(KernelProgram.of(BLOCKS.source), "sm_90") == names[0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", r"^NVRTC crashed \(SIGSEGV\) on blocks.cu for sm_90: try again$"),
        ("kill -40 $$", r"^NVRTC crashed \(signal 40\) on blocks.cu for sm_90: try again$"),
        (
            "[ -e $0.ran ] && exit 5; touch $0.ran; kill -SEGV $$",
            r"^NVRTC cannot compile blocks.cu for sm_90: status 5$",
        ),
        ("exit 3", r"^NVRTC cannot compile blocks.cu for sm_90: status 3$"),
        ("exec sleep 60", r"^NVRTC did not compile blocks.cu for sm_90 within 0 s$"),
    ],
)
def test_a_compiler_that_crashes_or_hangs_is_an_error_of_the_kernels(
    script: str, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    need_nvrtc()
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\n{script}\n")
    interpreter.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(CompileError, match=message):
        compile_program(BLOCKS, "sm_90", tmp_path, longest_s=0.2 if "sleep" in script else 60.0)
    assert {path.name for path in tmp_path.iterdir()} - {"python.ran"} == {"python"}


def test_where_kernels_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_CACHE_HOME", "CACHE_DIRECTORY", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)  # of a container: no entry, no home
    assert kernel_cache.cache_folder() == Path("/nonexistent")
    monkeypatch.setenv("HOME", "/home/someone")
    assert kernel_cache.cache_folder() == Path("/home/someone/.cache/kvstored/kernels")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/kvstored")
    assert kernel_cache.cache_folder() == Path("/var/cache/kvstored/kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert kernel_cache.cache_folder() == Path("/elsewhere/kvstored/kernels")


def test_what_a_killed_compilation_left_is_removed_and_what_another_makes_is_not(tmp_path: Path) -> None:
    target = tmp_path / "cuda-1.cubin"
    left, folder, made = tmp_path / "a.new", tmp_path / "b.new", tmp_path / "c.new"
    folder.mkdir()
    for path in (left, folder / "object.o", made):
        path.write_bytes(b"half")
    for path in (left, folder):
        os.utime(path, (1e9, 1e9))
    kernel_cache.keep(target, b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.new", "cuda-1.cubin"]
    assert target.read_bytes() == b"whole"


def test_a_cubin_that_cannot_be_kept_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cuda-1.cubin").mkdir()
    kernel_cache.keep(tmp_path / "cuda-1.cubin", b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["cuda-1.cubin"]
