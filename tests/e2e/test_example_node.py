"""examples/node runs as its README says, against a real daemon, and shares blocks with a Python client."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore_client import Fingerprint, LayerGroup
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.tidy.tree import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
EXAMPLE = ROOT / "examples/node"
MODEL = Fingerprint("demo", "sha256 of the weights", groups=(LayerGroup(0, "full", 0, (0, 1), 512),))  # as in store.js
_UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT", "ECONNRESET", "ENETUNREACH", "ENOTCACHED")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its packages, installed outside the tree."""
    for command in ("node", "npm"):
        if shutil.which(command) is None:
            pytest.skip(f"{command} is not installed")
    place = tmp_path_factory.mktemp("node")
    for name in ("package.json", "store.js"):
        shutil.copy(EXAMPLE / name, place)
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", "--fetch-retries=1"]
    installed = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=200)
    if installed.returncode and any(sign in installed.stderr for sign in _UNREACHABLE):
        pytest.skip(f"the npm registry cannot be reached: {installed.stderr.strip().splitlines()[0]}")
    assert installed.returncode == 0, installed.stderr
    return place


def run(example: Path, place: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "KVSTORED_PROTO": str(ROOT / "proto")}
    command = ["node", "store.js", place]
    return subprocess.run(command, cwd=example, capture_output=True, text=True, timeout=60, env=environment)


def printed_in_the_readme() -> str:
    console = (EXAMPLE / "README.md").read_text().partition("$ node store.js /tmp/kv\n")[2]
    return console.partition("```")[0]


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    with running_daemon() as running:
        yield running


def test_it_prints_what_its_readme_says(example: Path, daemon: RunningDaemon) -> None:
    ran = run(example, str(daemon.socket_dir))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == printed_in_the_readme()


def test_its_blocks_are_those_of_a_python_client(example: Path, daemon: RunningDaemon) -> None:
    tokens = list(range(192))
    payloads = [np.full(MODEL.payload_bytes(), block, np.uint8) for block in (1, 2, 3)]
    with daemon.connect(MODEL) as session:
        session.put(tokens, payloads=payloads, wait="settled")
        ran = run(example, str(daemon.socket_dir))
        assert ran.stdout.splitlines()[0].count("KEY_STATUS_PRESENT") == 3, ran.stdout + ran.stderr
        assert "the same bytes" in ran.stdout
        assert not session.lookup(tokens).blocks, "it deleted them"


def test_no_daemon_is_one_line(example: Path, tmp_path: Path) -> None:
    ran = run(example, str(tmp_path))
    assert ran.returncode == 1
    assert ran.stderr.startswith("UNAVAILABLE: ") and ran.stderr.count("\n") == 1
