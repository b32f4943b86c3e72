"""The parent's end of a `kill_client` process: orders out, answers in, and patience with a limit.

Owns one child and its pipes. Never knows what a life is; one that is dead or silent is a RuntimeError with its log.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from torture_runs.child_process import end_child, start_child


class Client:
    """One `kill_client` process; its answers come through a queue, so that a dead one is not waited for."""

    def __init__(self, socket_dir: Path, name: str, uid: int, seed: int, log: Path) -> None:
        self.name = f"client {name} of uid {uid}"
        self._log = log
        script = Path(__file__).with_name("kill_client.py")
        command: list[str | Path] = [sys.executable, script, socket_dir, name, str(uid), str(seed)]
        with log.open("wb") as errors:
            self._child = start_child(command, stdin=-1, stdout=-1, stderr=errors, text=True)
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._ended: dict[str, Any] | None = None

    def order(self, what: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._ended = None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()

    def wait_verified(self, patience_s: float) -> bool:
        """False when its life ended before it had checked everything."""
        answer = self._next(patience_s)
        self._ended = answer.get("ended")
        return "verified" in answer

    @property
    def interrupted_by(self) -> str:
        return str((self._ended or {}).get("interrupted_by", ""))

    def wait_ended(self, patience_s: float) -> dict[str, Any]:
        while self._ended is None:
            self._ended = self._next(patience_s).get("ended")
        return self._ended

    def close(self) -> None:
        end_child(self._child, 2.0)

    def _next(self, patience_s: float) -> dict[str, Any]:
        try:
            answer = self._lines.get(timeout=patience_s)
        except queue.Empty:
            answer = {}
        if not answer:
            raise RuntimeError(f"{self.name} does not answer:\n{self._log.read_text(errors='replace')[-2000:]}")
        return answer

    def _listen(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._lines.put(json.loads(line))
        self._lines.put({})
