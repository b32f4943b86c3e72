"""The real HTTP server for tests: `kvengine serve` as a child process on a free port.

Owns the child: start, signals, an end that leaves no process behind, and what it said.
Never does: stand in for any part of the server.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.reference.forked import popen

READY_TIMEOUT_S = 120.0
PATIENCE_S = 60.0
_SERVING = re.compile(r"serving .* on http://127\.0\.0\.1:(\d+)")


class RunningServer:
    """One server. `arguments` go to `kvengine serve`, with a port."""

    def __init__(self, folder: Path, model: Path, *arguments: str) -> None:
        self._log = folder / "server.log"
        with self._log.open("wb") as log:
            self.process = popen(
                [sys.executable, "-m", "kvstore_engine.cli", "serve", "--model", str(model), "--port", "0", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, "XDG_CACHE_HOME": os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))},
            )
        self.port = self._ready()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def request(
        self, method: str, path: str, body: Any = None, key: str | None = None
    ) -> tuple[int, Any, Mapping[str, str]]:
        """Status, body (from JSON where it is JSON), headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
            connection.request(method, path, raw, headers)
            response = connection.getresponse()
            text = response.read()
            is_json = response.getheader("content-type") == "application/json"
            return response.status, json.loads(text) if is_json else text.decode(), dict(response.getheaders())
        finally:
            connection.close()

    def health(self, key: str | None = None) -> dict[str, Any]:
        value: dict[str, Any] = self.request("GET", "/health", key=key)[1]
        return value

    def stop(self) -> int:
        """An orderly end; the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def _ready(self) -> int:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while (match := _SERVING.search(self.log)) is None:
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.02)
        return int(match[1])
