"""The bundle leaves out the wheels that a machine has."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.reference.benchmark_scripts import importable

TABLE = """Package           Version
----------------- ------------
grpcio            1.71.2
Torch_Thing       2.11.0+cu130
protobuf          5.29.5
notice: a new release of pip is available
"""
FREEZE = "grpcio==1.71.2\nTorch_Thing==2.11.0+cu130\nprotobuf==5.29.5\n-e git+https://x#egg=y\nz @ file:///z\n"
VERSIONS = {"grpcio": "1.71.2", "torch-thing": "2.11.0+cu130", "protobuf": "5.29.5"}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def bundle() -> ModuleType:
    import gpu_bundle

    return gpu_bundle


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in needs)]
        file.writestr(f"{name}-{version}.dist-info/METADATA", "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    "text", [TABLE, FREEZE, json.dumps([{"name": name, "version": version} for name, version in VERSIONS.items()])]
)
def test_what_a_machine_has_is_read_in_every_format_of_pip(text: str) -> None:
    assert {name: str(version) for name, version in bundle().listed(text).items()} == VERSIONS


def test_a_wheel_is_left_out_where_the_machine_has_one_that_all_others_take(tmp_path: Path) -> None:
    wheel(tmp_path, "health", "1.85", "grpcio>=1.85", "protobuf>=6", "old>=1; python_version < '3.8'")
    wheel(tmp_path, "grpcio", "1.85")
    wheel(tmp_path, "protobuf", "6.31", "numpy>=1")
    wheel(tmp_path, "numpy", "2.5")
    have = bundle().listed("grpcio 1.71.2\nprotobuf 7.1\nnumpy 1.20\n")
    assert bundle().left_out(tmp_path, ["health", "numpy>=1.26"], have, "3.12") == ["protobuf"]
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} == {"health", "grpcio", "numpy"}


def test_a_file_that_says_nothing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "have").write_text("pip: command not found\n")
    for path in (tmp_path / "have", tmp_path / "absent"):
        assert bundle().main(["--have", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_the_bundle_has_the_engines_library_and_cufile() -> None:
    for cuda in ("12", "13"):
        parts = bundle().parts(cuda)
        assert tuple(parts) == bundle().PARTS
        assert [each.partition(">")[0] for each in parts["engine"]] == ["xllamacpp"]
        assert parts["cufile"][0].startswith("nvidia-cufile")
