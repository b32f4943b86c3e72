"""Finding, loading and checking ggml."""

import ctypes as ct
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore_engine.ggml import GGMLError, Library, Tensor, find_library, library, load_library
from kvstore_engine.ggml.structs import CpuTypeTraits
from kvstore_engine.gguf import TENSOR_TYPES
from kvstore_engine.kernels import KernelError, select_kernels
from kvstore_engine.model.quantisation import multipliable_types
from kvstore_proto.ggml_types import BF16


def test_the_installed_library_loads_and_describes_itself() -> None:
    said = load_library().describe()
    assert Path(said["path"]).exists()
    assert said["version"][0].isdigit()


def test_the_variable_wins_and_a_wrong_one_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVENGINE_GGML", str(tmp_path))
    assert find_library() == tmp_path
    with pytest.raises(GGMLError, match="libggml"):
        Library(tmp_path)
    monkeypatch.setenv("KVENGINE_GGML", str(tmp_path / "absent.so"))
    with pytest.raises(GGMLError, match=r"KVENGINE_GGML=.*does not exist"):
        find_library()


def test_nothing_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVENGINE_GGML", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(GGMLError, match=r"\.\[engine\]"):
        find_library()


def test_a_split_build_is_taken_in_order_of_dependence(tmp_path: Path) -> None:
    for name in ("libggml.so", "libggml.so.0", "libggml-cpu.so", "libggml-base.so", "libllama.so"):
        (tmp_path / name).touch()
    assert [file.name for file in library._members(tmp_path)] == ["libggml-base.so", "libggml-cpu.so", "libggml.so"]


class _OlderLibrary:
    """Knows types up to bf16; the memory behind its table holds no types."""

    def blck_size(self, number: int) -> int:
        return TENSOR_TYPES[number].block_elements if number <= BF16 else 139_684_791

    def type_size(self, number: int) -> int:
        return TENSOR_TYPES[number].block_bytes if number <= BF16 else 139_684_823

    def type_name(self, number: int) -> bytes:
        assert number <= BF16, "no pointer to a name behind the table"
        return TENSOR_TYPES[number].name.upper().encode()

    def get_type_traits_cpu(self, number: int) -> int:
        assert number <= BF16
        self.traits = CpuTypeTraits(vec_dot=None if TENSOR_TYPES[number].name.startswith("i") else 1)
        return ct.addressof(self.traits)


def test_types_that_a_library_does_not_have_are_never_asked_about() -> None:
    known: Any = _OlderLibrary()
    types = {TENSOR_TYPES[number].name for number in multipliable_types(known)}
    assert {"f32", "bf16", "q4_k"} <= types
    assert not {"i32", "mxfp4", "nvfp4"} & types


def test_a_file_that_is_no_library_or_no_ggml_is_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.so"
    junk.write_bytes(b"not a library")
    with pytest.raises(GGMLError, match="cannot be loaded"):
        Library(junk)
    libc = next(
        (line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line),
        None,
    )
    if libc is None:
        pytest.skip("no libc.so among this process's maps")
    with pytest.raises(GGMLError, match="has no ggml_"):
        Library(Path(libc))


def test_another_tensor_layout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged = {"data": ("view_offs", ct.c_size_t), "view_offs": ("data", ct.c_void_p)}
    moved: Any = type(
        "Moved",
        (ct.Structure,),
        {
            "_fields_": [exchanged.get(field[0], field) for field in Tensor._fields_],
            "__doc__": "The size stays.",
        },
    )

    monkeypatch.setattr("kvstore_engine.ggml.library.tensor_at", moved.from_address)
    with pytest.raises(GGMLError, match="laid out otherwise"):
        Library(find_library())


def test_kernels_can_be_forced_and_a_wrong_name_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVENGINE_KERNEL", "reference")
    assert select_kernels().name == "reference"
    monkeypatch.setenv("KVENGINE_KERNEL", "fortran")
    with pytest.raises(KernelError, match="cpp, reference"):
        select_kernels()


def test_an_instruction_set_can_be_forced_and_one_that_is_not_here_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvstore_engine.kernels import selection

    monkeypatch.delenv("KVENGINE_KERNEL", raising=False)
    monkeypatch.setenv("KVENGINE_KERNEL_ISA", "mmx")
    selection._load.cache_clear()
    try:
        with pytest.raises(KernelError, match=r"instruction set 'mmx' cannot be used here; usable: \w+"):
            select_kernels()
    finally:
        selection._load.cache_clear()


def test_a_machine_without_a_compiler_falls_back_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from kvstore_engine.kernels import selection

    monkeypatch.delenv("KVENGINE_KERNEL", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setitem(sys.modules, "ziglang", None)
    selection._load.cache_clear()
    selection._fastest.cache_clear()
    try:
        assert select_kernels().name == "reference"
        assert "pip install '.[compiler]'" in caplog.text
        with pytest.raises(KernelError, match="no C\\+\\+ compiler"):
            select_kernels("cpp")
    finally:
        selection._load.cache_clear()
        selection._fastest.cache_clear()
