"""The generated code works with the protobuf and grpcio that engines pin, each pair in an environment of its own.

Daemon and client of one environment talk to daemon and client of another. Skipped by name where no package index can be
reached.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.tidy.tree import PACKAGES, ROOT, project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
# name: what pip is asked for. 5.29 with 1.71 is the oldest pair that we promise; vLLM 0.32 takes 5.29.6 or 6.33.5.
ENVIRONMENTS = {
    "protobuf 5.29, grpcio 1.71": ("protobuf>=5.29,<5.30", "grpcio>=1.71,<1.72"),
    "protobuf 6, grpcio of its time": ("protobuf>=6.33.5,<7", "grpcio>=1.76,<1.79"),
    "protobuf 7, newest grpcio": ("protobuf>=7,<8", "grpcio"),
}
_PROGRAM = Path(__file__).with_name("live_client.py")
_UNREACHABLE = ("No matching distribution", "Could not find a version", "Temporary failure", "NewConnectionError")


def _make(directory: Path, pins: tuple[str, ...]) -> Path:
    """A Python with what the base install needs, under `pins`; the packages themselves come from the tree."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True, capture_output=True)
    python = directory / "bin/python"
    needed = project()["project"]["dependencies"]
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *needed, *pins]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        if any(sign in result.stderr for sign in _UNREACHABLE):
            pytest.skip(f"no package index has {', '.join(pins)}: {result.stderr.strip().splitlines()[-1]}")
        pytest.fail(result.stderr)
    return python


@pytest.fixture(scope="module", params=list(ENVIRONMENTS))
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _make(tmp_path_factory.mktemp("environment"), ENVIRONMENTS[request.param])


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


def _environment() -> dict[str, str]:
    """The tree's packages, and nothing that this environment has installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(str(path.parent) for path in PACKAGES.values())}


def _use(python: Path, socket_dir: Path) -> dict[str, object]:
    run = subprocess.run(
        [python, "-W", "error::UserWarning", _PROGRAM, socket_dir],
        capture_output=True, text=True, timeout=120, cwd=ROOT, env=_environment(),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result: dict[str, object] = json.loads(run.stdout)
    return result


def test_another_environments_client_uses_our_daemon(python: Path, daemon: RunningDaemon) -> None:
    report = _use(python, daemon.socket_dir)
    assert int(str(report["messages"])) > 40


def test_our_client_uses_another_environments_daemon(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base under the oldest libraries is a daemon, too."""
    monkeypatch.setattr("tests.reference.running_daemon.sys.executable", str(python))
    monkeypatch.setenv("PYTHONPATH", _environment()["PYTHONPATH"])
    with running_daemon() as elsewhere:
        monkeypatch.undo()
        _use(Path(sys.executable), elsewhere.socket_dir)
