"""How much of obstore's own speed is left when values are read through the driver of object stores?

64 values of 1 MiB, written at once, are read through the driver into memory that is lent to it. Baselines, of the same
run and store: obstore alone, which reads the same bytes into plain memory as 64 objects of 1 MiB at once, and as one
ranged read of one object. obstore reads into buffers of its own, new ones for each request: the copy into memory that
the caller has is part of both. A further row, without a target, compares with obstore that leaves it out.

On a directory, and on the S3 server of the package moto: a Python process, which is the limit of its figures. Further:
a start with an index of many blocks, and `sizes` of 64 names with a young index.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import secrets
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers

import numpy as np
import obstore
from obstore.store import from_url
from support.report import AT_LEAST, Row, main, progress
from support.timing import median, time_each

from kvstore_tiers.remote.driver import Driver, Placed
from kvstore_tiers.remote.drivers import open_driver
from kvstore_tiers.remote.drivers.runs.values import AddedRun, Change, rows_of
from tests.reference.s3_server import KEYS, s3_server

COUNT, NBYTES = 64, 1 << 20
TARGET = 0.9


def measure(quick: bool) -> list[Row]:
    rounds = 3 if quick else 15
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVSTORED_BENCH_DIR")) as directory:
        plain = from_url(f"file://{directory}")
        rows += _reads("directory", f"file://{directory}/driver", {}, plain, rounds)
        rows += _index(Path(directory) / "index", 100_000 if quick else 1_000_000)
    with s3_server() as server:
        server.make_bucket("blocks")
        config: Any = {"endpoint": server.endpoint, "region": "us-east-1", **KEYS}
        plain = from_url("s3://blocks/plain", config=config, client_options={"allow_http": True})
        rows += _reads("s3", server.url("blocks/driver"), KEYS, plain, rounds)
    return rows


def _reads(kind: str, url: str, credentials: dict[str, str], plain: Any, rounds: int) -> list[Row]:
    memory = memoryview(mmap.mmap(-1, COUNT * NBYTES))
    memory[:] = np.random.default_rng(0).bytes(len(memory))
    whole = bytes(memory)
    names = [secrets.token_hex(24) for _ in range(COUNT)]
    placed = [Placed(name, memory[at * NBYTES : (at + 1) * NBYTES]) for at, name in enumerate(names)]
    with closing(open_driver(url, timeout_s=60, threads=2, credentials=credentials)) as driver:
        driver.lend(memory)
        driver.write(placed)
        memory[:] = bytes(len(memory))
        obstore.put(plain, "whole", whole)
        for at in range(COUNT):
            obstore.put(plain, f"single-{at}", whole[at * NBYTES : (at + 1) * NBYTES])

        target = memoryview(bytearray(len(whole)))

        async def each_object(*, copies: bool) -> None:
            async def read(at: int) -> None:
                content = await (await obstore.get_async(plain, f"single-{at}")).bytes_async()
                if copies:
                    target[at * NBYTES : (at + 1) * NBYTES] = memoryview(content)

            await asyncio.gather(*(read(at) for at in range(COUNT)))

        def one_range() -> None:
            target[:] = memoryview(obstore.get_range(plain, "whole", start=0, end=len(whole)))

        actions: dict[str, Callable[[], object]] = {
            "driver": lambda: driver.read(placed),
            "objects": lambda: asyncio.run(each_object(copies=True)),
            "range": one_range,
            "buffers": lambda: asyncio.run(each_object(copies=False)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in actions}
        for round_number in range(rounds + 1):
            for name, action in actions.items():
                taken = time_each(action, 1)
                seconds[name] += taken if round_number else []
        assert bytes(memory) == whole
        speed = {name: COUNT * NBYTES / median(taken) / 1e9 for name, taken in seconds.items()}
        progress(f"{kind}: {', '.join(f'{name} {value:.2f} GB/s' for name, value in speed.items())}")
        return [
            Row(f"{kind}_read_vs_objects", speed["driver"], "GB/s", speed["objects"], "obstore, 64 objects at once",
                bound=AT_LEAST, target=TARGET),
            Row(f"{kind}_read_vs_range", speed["driver"], "GB/s", speed["range"], "obstore, one ranged read",
                bound=AT_LEAST, target=TARGET),
            Row(f"{kind}_read_vs_buffers", speed["driver"], "GB/s", speed["buffers"], "obstore, 64 objects, no copy"),
            _sizes(kind, driver, names),
        ]  # fmt: skip


def _sizes(kind: str, driver: Driver, names: list[str]) -> Row:
    """Without a request, against one that lists the log."""
    driver.probe()
    asked = median(time_each(driver.probe, 5))
    known = median(time_each(lambda: driver.sizes(names), 200))
    return Row(f"{kind}_sizes_of_64", known * 1e3, "ms", asked * 1e3, "one listing")


def _index(directory: Path, blocks: int) -> list[Row]:
    """Open a store whose checkpoint has so many blocks, against reading the checkpoint's bytes."""
    per_run = 64
    names = np.random.default_rng(1).bytes(24 * blocks)
    runs = [
        AddedRun(
            secrets.token_hex(16),
            rows_of([names[at * 24 : at * 24 + 24] for at in range(first, first + per_run)], [NBYTES] * per_run),
        )
        for first in range(0, blocks - per_run + 1, per_run)
    ]
    checkpoint = directory / "checkpoints" / f"{256:020}"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.write_bytes(Change((), runs).pack())
    wanted = names[:24].hex()

    def start() -> None:
        with closing(open_driver(f"file://{directory}", timeout_s=120, threads=2, credentials={})) as driver:
            assert driver.sizes([wanted]) == [NBYTES]

    taken, plain = median(time_each(start, 3)), median(time_each(checkpoint.read_bytes, 3))
    progress(f"index of {blocks} blocks: {checkpoint.stat().st_size / 1e6:.0f} MB, read in {taken:.2f} s")
    return [Row("start_with_index", taken * 1e3, "ms", plain * 1e3, f"reading its {blocks} rows as bytes")]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
