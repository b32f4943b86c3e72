"""A kvstored of the demo's own in a temporary directory, and the commands a person would type at it.

Everything goes through the installed commands (`kvstored`, `kvctl`, `kvengine`): the demo uses nothing that a user
does not have.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMMANDS = Path(sys.executable).parent
READY_TIMEOUT_S = 60.0
GENERATE_TIMEOUT_S = 170.0


class DemoFailedError(Exception):
    """A step did not do what it should; the message says which and shows what the command said."""


def prepare(model: str) -> bool:
    """Set-up, before anything is measured: fetch and convert the model, compile the kernels. Progress, and the terms of
    a model that has some, on stderr. Whether the model has a chat template."""
    name, _, quantisation = model.partition(":")
    if not name.endswith(".gguf"):
        fetch = [str(COMMANDS / "kvengine"), "fetch", name]
        if quantisation:
            fetch += ["--quant", quantisation]
        if subprocess.run(fetch, stdout=sys.stderr, check=False).returncode:
            raise DemoFailedError(f"the model {model} could not be had (see above)")
    print("first run of the engine", file=sys.stderr, flush=True)
    once = [str(COMMANDS / "kvengine"), "generate", "--model", model, "--prompt", "Hello", "--max-tokens", "2"]
    done = subprocess.run([*once, "--quiet"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DemoFailedError(f"the engine does not run: {done.stderr.strip()}")
    facts = subprocess.run([*once[:1], "info", model, "--json"], capture_output=True, text=True, check=True)
    return bool(json.loads(facts.stdout)["chat_template"] == "yes")


class Node:
    """The daemon and its sockets. `start` returns once it serves."""

    def __init__(self, directory: Path, settings: Sequence[str]) -> None:
        self.socket_dir = directory / "run"
        self.nvme_dir = directory / "state" / "nvme"
        self._log = directory / "kvstored.log"
        self._command = [
            str(COMMANDS / "kvstored"), "serve", "--socket-dir", str(self.socket_dir), "--state-dir",
            str(directory / "state"), *(argument for setting in settings for argument in ("--set", setting)),
        ]  # fmt: skip
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, Any]:
        """Start and wait until it serves; its status."""
        self._log.parent.mkdir(exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            answer = self._kvctl("status")
            if answer.returncode == 0:
                status: dict[str, Any] = json.loads(answer.stdout)
                return status
            time.sleep(0.05)
        raise DemoFailedError(f"the daemon did not start:\n{self._log.read_text()[-2000:]}")

    def kill(self) -> None:
        """kill -9: no chance to write anything."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kvctl(self, *arguments: str) -> dict[str, Any]:
        """`kvctl ... --json` as an object."""
        answer = self._kvctl(*arguments)
        if answer.returncode != 0:
            raise DemoFailedError(f"kvctl {' '.join(arguments)} failed: {answer.stderr.strip()}")
        parsed: dict[str, Any] = json.loads(answer.stdout)
        return parsed

    def kvctl_table(self, *arguments: str) -> str:
        """Return the table that `kvctl` prints for people."""
        command = [str(COMMANDS / "kvctl"), "--socket-dir", str(self.socket_dir), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout

    def tier(self, name: str) -> dict[str, Any]:
        tiers = {tier["name"]: tier for tier in self.kvctl("tiers")["tiers"]}
        found: dict[str, Any] = tiers[name]
        return found

    def ask(self, model: str, tokens: int, *prompt: str) -> dict[str, Any]:
        """One answer from an engine process of its own. `prompt`: options of kvengine generate."""
        command = [
            str(COMMANDS / "kvengine"), "generate", "--model", model, *prompt, "--max-tokens", str(tokens), "--kvstore",
            str(self.socket_dir), "--json", "--quiet", "--no-stream",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, timeout=GENERATE_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise DemoFailedError(f"kvengine failed ({done.returncode}): {done.stderr.strip()}")
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    def _kvctl(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(COMMANDS / "kvctl"), "--socket-dir", str(self.socket_dir), "--json", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def flip_a_byte(path: Path, offset: int) -> None:
    """Damage one byte of a file behind everybody's back, on the medium itself."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 0x40]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
