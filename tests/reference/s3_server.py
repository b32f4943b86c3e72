"""An S3 server of a package (moto) on a free port of this machine, for tests: real requests over real sockets.

It keeps objects in its memory: killed, it forgets everything.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.reference.running_daemon import free_port

START_S = 60.0
KEYS = {"access_key_id": "tester", "secret_access_key": "secret"}


class S3Server:
    """`needs_keys`: it refuses whoever has no keys of its own, once the bucket is made."""

    def __init__(self, *, needs_keys: bool = False) -> None:
        self._needs_keys = needs_keys
        self.port = free_port()
        self.process = self._started()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def url(self, place: str, **options: str) -> str:
        query = "".join(f"&{key}={value}" for key, value in options.items())
        return f"s3://{place}?endpoint={self.endpoint}&region=us-east-1&allow_http=true{query}"

    def make_bucket(self, name: str) -> None:
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        urllib.request.urlopen(request, timeout=START_S).close()

    def restart(self) -> None:
        self.stop()
        self.process = self._started()

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def _started(self) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if self._needs_keys:
            environment["INITIAL_NO_AUTH_ACTION_COUNT"] = "1"
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                urllib.request.urlopen(f"{self.endpoint}/moto-api/", timeout=1).close()
                return process
            except (urllib.error.URLError, OSError):
                time.sleep(0.05)
        process.kill()
        process.wait()
        raise RuntimeError("the S3 server of moto does not answer")


@contextmanager
def s3_server(*, needs_keys: bool = False) -> Iterator[S3Server]:
    server = S3Server(needs_keys=needs_keys)
    try:
        yield server
    finally:
        server.stop()
