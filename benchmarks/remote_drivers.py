"""Drivers of the remote tier alone: 64 values of 1 MiB into lent memory, against the library's own client.

    python benchmarks/remote_drivers.py [--json] [--quick]

Servers are real ones of this machine: redis or Valkey on a Unix socket, Mooncake over TCP on a loopback of its own, its
memory in another process. Baselines: redis-py (with hiredis), the faster of MGET and a pipeline of GET, whose values
are copied into memory of the caller's as a reader would, and without that copy; Mooncake's own batch_get_into. Rounds
of all take turns; medians. A store that cannot run here is named with its reason and left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from mmap import mmap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers

import numpy as np
import pytest
from support.remote_stores import mooncake_client
from support.report import AT_LEAST, Row, main, progress
from support.timing import median, time_once

from kvstore_tiers.remote.driver import Driver, Placed, Written
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.testing.driver_contract import new_names, noise
from tests.reference.own_network import own_network
from tests.reference.remote_servers import mooncake_store, redis_binaries, redis_server, skip_without_mooncake

VALUES, VALUE_BYTES = 64, 1 << 20
BATCH_BYTES = VALUES * VALUE_BYTES
TARGET = 0.95
TIMEOUT_S = 20.0


def measure(quick: bool) -> list[Row]:
    rounds = 5 if quick else 21
    rows: list[Row] = []
    for name, binary in redis_binaries().items():
        progress(f"{name} ...")
        rows += _redis(name.partition("-")[0], binary, rounds)
    progress("mooncake ...")
    try:
        skip_without_mooncake()
        with own_network():
            rows += _mooncake(rounds)
    except pytest.skip.Exception as reason:
        progress(f"mooncake: left out, {reason}")
    return rows


class Batch:
    """Values that were written through a driver, and the memory that it reads them into."""

    def __init__(self, driver: Driver) -> None:
        self.memory = memoryview(mmap(-1, BATCH_BYTES))
        self.names = new_names(VALUES)
        self._driver = driver
        self._rows = [self.memory[start : start + VALUE_BYTES] for start in range(0, BATCH_BYTES, VALUE_BYTES)]
        driver.lend(self.memory)
        for number, row in enumerate(self._rows):
            row[:] = noise(VALUE_BYTES, number)
        if set(driver.write(self._placed)) != {Written.STORED}:
            raise RuntimeError("the values were not stored")

    @property
    def _placed(self) -> list[Placed]:
        return [Placed(name, row) for name, row in zip(self.names, self._rows, strict=True)]

    def read(self) -> None:
        if self._driver.read(self._placed) != [VALUE_BYTES] * VALUES:
            raise RuntimeError("the values did not come back")

    def check(self) -> None:
        for row in self._rows:
            row[:8] = bytes(8)
        self.read()
        if any(row.tobytes() != noise(VALUE_BYTES, number) for number, row in enumerate(self._rows)):
            raise RuntimeError("the values are not those that were written")


def _redis(name: str, binary: Path, rounds: int) -> list[Row]:
    import redis

    with (
        tempfile.TemporaryDirectory(prefix="kvredis-") as folder,
        redis_server(Path(folder), binary) as server,
        closing(open_driver(server.url, timeout_s=TIMEOUT_S, threads=1, credentials={})) as driver,
        redis.Redis(unix_socket_path=str(server.path)) as client,
    ):
        batch = Batch(driver)
        batch.check()
        keys = [f"kvstored:{one}" for one in batch.names]
        plain = np.frombuffer(mmap(-1, BATCH_BYTES), np.uint8).reshape(VALUES, VALUE_BYTES)

        def several() -> Sequence[Any]:
            return list(client.mget(keys))

        def pipeline() -> Sequence[Any]:
            with client.pipeline(transaction=False) as commands:
                for key in keys:
                    commands.get(key)
                return list(commands.execute())

        def copied(get: Callable[[], Sequence[Any]]) -> None:
            for row, value in zip(plain, get(), strict=True):
                row[:] = np.frombuffer(value, np.uint8)

        speeds = _speeds(
            {
                "driver": batch.read,
                "mget": several,
                "pipeline": pipeline,
                "mget, copied": lambda: copied(several),
                "pipeline, copied": lambda: copied(pipeline),
            },
            rounds,
        )
    handed_out = max(speeds["mget"], speeds["pipeline"])
    into_memory = max(speeds["mget, copied"], speeds["pipeline, copied"])
    return [
        _row(f"remote_driver_{name}", speeds["driver"], into_memory, "redis-py into plain memory"),
        _row(f"remote_driver_{name}_no_copy", speeds["driver"], handed_out, "redis-py, as it hands values out"),
    ]


def _mooncake(rounds: int) -> list[Row]:
    with (
        tempfile.TemporaryDirectory(prefix="kvmooncake-") as folder,
        mooncake_store(Path(folder)) as store,
        closing(open_driver(store.url, timeout_s=TIMEOUT_S, threads=1, credentials={})) as driver,
    ):
        batch = Batch(driver)
        batch.check()
        with mooncake_client(store.master.address, batch.names, VALUE_BYTES) as alone:
            speeds = _speeds({"driver": batch.read, "alone": alone}, rounds)
    return [_row("remote_driver_mooncake", speeds["driver"], speeds["alone"], "Mooncake's batch_get_into")]


def _speeds(actions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """GiB/s of each; the first round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in list(actions.items())[:: 1 if number % 2 else -1]:  # who goes first may have it easier
            seconds[name].append(time_once(action))
    return {name: BATCH_BYTES / 2**30 / median(taken[1:]) for name, taken in seconds.items()}


def _row(name: str, value: float, baseline: float, baseline_name: str) -> Row:
    return Row(name, value, "GiB/s", baseline, baseline_name, AT_LEAST, TARGET)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
