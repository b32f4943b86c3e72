"""No daemon at all: an empty message through the same kind of stream, to a server that hands it back.

    python echo_client.py

The shortest time that a lookup by the stream can take on this machine, with any daemon. `support/echo.py` describes
its parts.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from serving import serve

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from support.echo import EchoClient, echo


class Echoes:
    """A contender that echoes (see `kvstored_client`); the number has no effect."""

    def __init__(self, client: EchoClient) -> None:
        self._client = client

    def lookup(self, number: int, times: int) -> list[float]:
        seconds: list[float] = []
        for _ in range(times):
            started = time.perf_counter()
            self._client.ping()
            seconds.append(time.perf_counter() - started)
        return seconds


if __name__ == "__main__":
    with echo() as client:
        serve({"lookup": Echoes(client).lookup})
