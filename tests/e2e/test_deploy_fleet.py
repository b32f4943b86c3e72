"""The script of the small fleet: a conversation moves between nodes through redis, and nothing of it is left."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_engine.models.cache import cache_root
from tests.reference.remote_servers import redis_binary
from tests.tidy.tree import ROOT

MODEL = "smollm2-135m-instruct:q8_0"
PACKAGES = {"redis": "remote", "cryptography": "remote", "zmq": "events", "msgspec": "events", "starlette": "server",
            "uvicorn": "server", "xllamacpp": "engine"}  # fmt: skip


def run(*options: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "deploy/fleet/run.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT)


def processes_that_name(text: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command:
            found.append(command)
    return found


@pytest.fixture
def _usable() -> None:
    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} (pip install '.[{extra}]') is not installed")
    if not (importlib.util.find_spec("httpx2") or importlib.util.find_spec("httpx")):
        pytest.skip("httpx is not installed")
    redis_binary()
    if not any(cache_root().rglob("*SmolLM2*q8_0*.gguf")):
        pytest.skip(f"the model {MODEL} is not in the cache: kvengine fetch smollm2-135m-instruct --quant q8_0")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("_usable")
def test_a_conversation_moves_and_keeps_its_prefix() -> None:
    done = run("--conversations", "1", "--model", MODEL, "--json", "--keep", timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    turns = figures["turns"]
    nodes = [turn["answer"]["node"] for turn in turns]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3] != nodes[4], "the router follows the events"
    assert [turn["has_moved"] for turn in turns] == [False, False, True, False, True]
    for turn in (turns[2], turns[4]):
        assert turn["restored"]["remote"] > turn["answer"]["prompt_tokens"] // 2
    for turn in (turns[1], turns[3]):
        assert turn["answer"]["known_tokens"] > turn["answer"]["prompt_tokens"] // 2
    found = re.search(r"logs are in (\S+)", done.stdout)
    assert found is not None and not processes_that_name(found[1])
    for path in sorted(Path(found[1]).rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
    Path(found[1]).rmdir()


def test_help_has_examples_and_exit_codes() -> None:
    done = run("--help")
    assert done.returncode == 0 and "python deploy/fleet/run.py" in done.stdout and "exit codes" in done.stdout


def test_mistakes_are_said_in_one_line() -> None:
    assert "--nodes is 3 to 9" in run("--nodes", "2").stderr
    if os.geteuid() == 0 and importlib.util.find_spec("mooncake") is not None:
        done = run("--store", "mooncake", "--loopback")
        assert done.returncode == 1 and "Traceback" not in done.stderr and done.stderr.startswith("fleet: ")
