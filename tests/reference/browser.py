"""A real browser for tests: Debian's Chromium without a window, driven by chromedriver over its HTTP protocol."""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.reference.running_daemon import eventually, free_port

ARGUMENTS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,1600"]


class Browser:
    """One window of the browser. It raises RuntimeError with the driver's words where a command fails."""

    def __init__(self, port: int) -> None:
        self._at = f"http://127.0.0.1:{port}"
        options = {"goog:chromeOptions": {"args": ARGUMENTS}, "goog:loggingPrefs": {"browser": "ALL"}}
        made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self._session = f"/session/{made['sessionId']}"

    def open(self, url: str) -> None:
        self._ask("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str) -> Any:
        """Return what `script`, the body of a function in JavaScript, returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": []})

    def text(self) -> str:
        return str(self.run("return document.body.innerText"))

    def log(self) -> list[str]:
        """Return what the console said since the last call."""
        return [entry["message"] for entry in self._ask("POST", f"{self._session}/se/log", {"type": "browser"})]

    def close(self) -> None:
        self._ask("DELETE", self._session)

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._at + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None


@contextmanager
def real_browser() -> Iterator[Browser]:
    """Yield a browser; skip the test where Debian's packages chromium and chromium-driver are not installed."""
    if shutil.which("chromium") is None or shutil.which("chromedriver") is None:
        pytest.skip("Debian's packages chromium and chromium-driver are not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        environment = {"HOME": home, "PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": home, "TMPDIR": home}
        with open(Path(home) / "log", "wb") as log:
            command = ["chromedriver", f"--port={port}"]
            driver = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            assert eventually(lambda: b"was started successfully" in (Path(home) / "log").read_bytes())
            browser = Browser(port)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(30)
