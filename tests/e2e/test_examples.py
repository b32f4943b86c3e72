"""The examples run as a reader would run them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.reference.running_daemon import running_daemon
from tests.tidy.tree import ROOT

_EXAMPLE = ROOT / "examples/tiny_engine.py"


def _run(socket_dir: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-W", "error", _EXAMPLE, socket_dir], capture_output=True, text=True, timeout=60, check=True
    )
    return run.stdout


def test_the_tiny_engine_restores_and_answers_the_same(tmp_path: Path) -> None:
    with running_daemon() as daemon:
        cold, warm = _run(daemon.socket_dir), _run(daemon.socket_dir)
    alone = _run(tmp_path)
    answers = {text.partition(";")[0] for text in (cold, warm, alone)}
    assert len(answers) == 1, "the store must not change an answer"
    assert "; 0 of 1000 prompt tokens" in cold
    assert "; 960 of 1000 prompt tokens" in warm
    assert alone.strip().endswith("(degraded)")


def test_the_tiny_engine_is_short_enough_to_read() -> None:
    assert len(_EXAMPLE.read_text().splitlines()) <= 65
