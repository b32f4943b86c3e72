"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.reference.running_daemon import running_daemon
from tests.tidy.tree import ROOT

_EXAMPLE = ROOT / "examples/tiny_engine.py"


def _ended(example: Path, socket_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", example, socket_dir]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def _run(socket_dir: Path, example: Path = _EXAMPLE) -> str:
    ended = _ended(example, socket_dir)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_the_tiny_engine_restores_and_answers_the_same(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        cold, warm = _run(daemon.socket_dir), _run(daemon.socket_dir)
    alone = _run(tmp_path)
    answers = {text.partition(";")[0] for text in (cold, warm, alone)}
    assert len(answers) == 1, "the store must not change an answer"
    assert "; 0 of 1000 prompt tokens" in cold
    assert "; 960 of 1000 prompt tokens" in warm
    assert alone.strip().endswith("(degraded)")


@pytest.mark.slow
def test_torch_attends_to_what_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    example = ROOT / "examples/torch_arrays.py"
    with running_daemon() as daemon:
        first, second = _run(daemon.socket_dir, example), _run(daemon.socket_dir, example)
    assert first == "8 blocks stored; attention over 512 stored tokens is the same: True\n"
    assert second == first.replace("8 blocks", "0 blocks")
    assert _run(tmp_path, example) == "nothing is stored (degraded)\n"


def test_the_example_for_cupy_says_in_a_line_what_it_needs(tmp_path: Path) -> None:
    ended = _ended(ROOT / "examples/cupy_arrays.py", tmp_path)
    if not ended.returncode:
        pytest.skip("there is a GPU: the example lacks nothing")
    assert ended.stderr.startswith("this example needs ") and ended.stderr.count("\n") == 1, ended.stderr


def test_the_tiny_engine_is_short_enough_to_read() -> None:
    assert len(_EXAMPLE.read_text().splitlines()) <= 65
