"""The wheels to carry to a machine without an index: which, for which Python, and what is said of their sizes."""

from __future__ import annotations

import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.reference.benchmark_scripts import importable
from tests.tidy.tree import ROOT


@pytest.fixture
def bundle(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    for _ in importable(monkeypatch):
        import gpu_bundle

        yield gpu_bundle


class Pip:
    """Answers a download with one wheel of `nbytes`."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.commands: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> None:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "one-1-py3-none-any.whl").write_bytes(bytes(self.nbytes))


@pytest.mark.parametrize(("cuda", "extra"), [("13", "cuda"), ("12", "cuda12")])
def test_the_parts_are_what_the_package_needs(bundle: ModuleType, cuda: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    parts = bundle.parts(cuda)
    assert set(project["dependencies"]) < set(parts["base"])
    assert set(project["optional-dependencies"][extra]) < {*parts["base"], *parts["nvrtc"]}
    assert ["nvrtc" in each for each in parts["base"]].count(True) == 0 and "nvrtc" in parts["nvrtc"][0]


def test_a_part_is_downloaded_for_that_machine_and_judged_by_its_size(
    bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pip = Pip(3 << 20)
    monkeypatch.setattr(bundle.subprocess, "run", pip)
    (tmp_path / "nvrtc").mkdir()
    (tmp_path / "nvrtc" / "old-0-py3-none-any.whl").write_bytes(b"")
    arguments = ["--only", "nvrtc", "--python", "3.13", "--out", str(tmp_path)]
    assert bundle.main(arguments) == 0
    (command,) = pip.commands
    assert command[command.index("--python-version") + 1] == "3.13" and "manylinux_2_28_x86_64" in command
    assert [path.name for path in (tmp_path / "nvrtc").iterdir()] == ["one-1-py3-none-any.whl"]
    assert "nvrtc        3.0 MiB" in capsys.readouterr().out
    assert bundle.main([*arguments, "--part-limit", "2"]) == 1
    assert "nvrtc is larger than 2 MiB" in capsys.readouterr().err


def test_what_pip_cannot_find_is_said(
    bundle: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(bundle.subprocess, "run", fail)
    assert bundle.main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("gpu-bundle: pip finds not all of grpcio")
