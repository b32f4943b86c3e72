"""Measures how fast a daemon gets 64 blocks of 1 MiB that are in a remote store alone.

Against the same bytes read into plain memory by the library's own client, in turns with it: redis-py's MGET, obstore
with 64 requests at once, Mooncake's batch_get_into. What a get does beyond it: it asks which blocks are there, opens
and verifies each, and copies it into memory that clients map. Once with values as they are, once encrypted. Stores that
cannot run here are named and left out.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.daemon import BenchDaemon, bench_daemon, model, payloads, tokens_of
from support.report import AT_LEAST, Row, main, median, progress, time_once

from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' servers
from tests.reference.own_network import own_network
from tests.reference.remote_servers import mooncake_store, redis_server, skip_without_mooncake
from tests.reference.s3_server import KEYS, s3_server

BLOCKS, BLOCK_BYTES = 64, 1 << 20
GIB = BLOCKS * BLOCK_BYTES / 2**30
PLAIN_TARGET, ENCRYPTED_TARGETS = 0.85, {"redis": 0.6, "s3": 0.6}
MODEL = model(BLOCK_BYTES)
PATIENCE_S = 60.0
BUCKET = "blocks"
Read = Callable[[], None]


def measure(quick: bool) -> list[Row]:
    rows = []
    for name, start in {"redis": redis_store, "mooncake": mooncake, "s3": s3_store}.items():
        for encrypt in (False, True)[: 1 + (name in ENCRYPTED_TARGETS)]:  # Mooncake's client starts once a process
            progress(f"{name}, {'encrypted' if encrypt else 'plain'} ...")
            try:
                with start() as store:
                    rows.append(_row(name, store, encrypt, 5 if quick else 15))
            except pytest.skip.Exception as reason:
                progress(f"{name}: left out, {reason}")
    return rows


def _row(name: str, store: RemoteStore, encrypt: bool, rounds: int) -> Row:
    values = [payload.tobytes() for payload in payloads(BLOCKS, BLOCK_BYTES)]
    with _daemon(store, encrypt) as daemon, daemon.connect(MODEL) as session, store.alone(values) as alone:
        session.put(tokens_of(1, BLOCKS), payloads=[np.frombuffer(value, np.uint8) for value in values])
        _wait_shared(daemon)
        ours, theirs = [], []
        for number in range(rounds + 2):
            turns = [lambda: theirs.append(time_once(alone)), lambda: ours.append(_get(daemon, session))]
            for turn in turns[:: 1 if number % 2 else -1]:
                turn()
    kind = "encrypted" if encrypt else "plain"
    target = ENCRYPTED_TARGETS.get(name) if encrypt else PLAIN_TARGET
    return Row(
        f"remote get, {name}, {kind}", GIB / median(ours[2:]), "GiB/s", GIB / median(theirs[2:]),
        "the library's own client", AT_LEAST, target,
    )  # fmt: skip


@contextmanager
def _daemon(store: RemoteStore, encrypt: bool) -> Iterator[BenchDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvremote-") as folder:
        credentials = Path(folder) / "credentials"
        credentials.write_text("".join(f"{name} = {value}\n" for name, value in store.credentials.items()))
        credentials.chmod(0o600)
        with bench_daemon(
            "host.capacity=1GiB", "nvme.enabled=false", "tier.remote.kind=remote", f"tier.remote.url={store.url}",
            "tier.remote.share=all", f"tier.remote.encrypt={str(encrypt).lower()}", "tier.remote.timeout_ms=20000",
            f"tier.remote.credentials_file={credentials}",
        ) as daemon:  # fmt: skip
            yield daemon


def _wait_shared(daemon: BenchDaemon) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while daemon.admin("Status", admin_pb2.StatusRequest()).counters["shared_blocks"] < BLOCKS:
        if time.monotonic() > deadline:
            raise TimeoutError("the blocks were not written to the remote store")
        time.sleep(0.05)


def _get(daemon: BenchDaemon, session: Session) -> float:
    """Seconds of a get, all of whose blocks are in the remote store alone."""
    tokens, deadline = tokens_of(1, BLOCKS), time.monotonic() + PATIENCE_S
    daemon.drop_host()
    while here := _tiers(daemon)["host"].blocks:  # the lease of the get before may end a little later
        if time.monotonic() > deadline:
            raise TimeoutError(f"{here} blocks stay in DRAM")
        time.sleep(0.01)
        daemon.drop_host()
    began = time.perf_counter()
    with session.get(tokens, deadline_s=60.0) as lease:
        seconds = time.perf_counter() - began
        if lease.blocks != BLOCKS:
            raise RuntimeError(f"{lease.blocks} of {BLOCKS} blocks came back")
    return seconds


def _tiers(daemon: BenchDaemon) -> dict[str, admin_pb2.TierStatus]:
    return {tier.name: tier for tier in daemon.admin("Tiers", admin_pb2.TiersRequest()).tiers}


@dataclass(frozen=True)
class RemoteStore:
    """`alone(values)` stores these values and gives a read of all of them into plain memory, by the library's own
    client."""

    url: str
    alone: Callable[[Sequence[bytes]], Any]
    credentials: dict[str, str] = field(default_factory=dict)


@contextmanager
def redis_store() -> Iterator[RemoteStore]:
    import redis

    @contextmanager
    def alone(values: Sequence[bytes]) -> Iterator[Read]:
        plain = plain_memory(values)
        with redis.Redis(unix_socket_path=str(server.path)) as client:
            names = [f"alone-{at}" for at in range(len(values))]
            for name, value in zip(names, values, strict=True):
                client.set(name, value)

            def read() -> None:
                for row, value in zip(plain, client.mget(names), strict=True):
                    row[:] = np.frombuffer(value, np.uint8)

            yield read

    with tempfile.TemporaryDirectory(prefix="kvredis-") as folder, redis_server(Path(folder)) as server:
        yield RemoteStore(server.url, alone)


@contextmanager
def s3_store() -> Iterator[RemoteStore]:
    """The S3 server of the package moto, a Python process."""
    import obstore
    from obstore.store import from_url

    with s3_server() as server:
        server.make_bucket(BUCKET)
        config: Any = {"endpoint": server.endpoint, "region": "us-east-1", **KEYS}
        store = from_url(f"s3://{BUCKET}/alone", config=config, client_options={"allow_http": True})

        @contextmanager
        def alone(values: Sequence[bytes]) -> Iterator[Read]:
            plain = plain_memory(values)
            for at, value in enumerate(values):
                obstore.put(store, f"value-{at}", value)

            async def read_all() -> None:
                async def one(at: int) -> None:
                    content = await (await obstore.get_async(store, f"value-{at}")).bytes_async()
                    plain[at][:] = np.frombuffer(memoryview(content), np.uint8)

                await asyncio.gather(*(one(at) for at in range(len(values))))

            yield lambda: asyncio.run(read_all())

        yield RemoteStore(server.url(f"{BUCKET}/kvstored", index_age_s="0.2"), alone, KEYS)


@contextmanager
def mooncake() -> Iterator[RemoteStore]:
    """Over TCP, on a loopback of its own. Raises the skip of pytest where it cannot run."""
    skip_without_mooncake()

    @contextmanager
    def alone(values: Sequence[bytes]) -> Iterator[Read]:
        names = [f"alone-{at}" for at in range(len(values))]
        with mooncake_client(store.master.address, names, len(values[0]), values) as read:
            yield read

    with (
        own_network(),
        tempfile.TemporaryDirectory(prefix="kvmooncake-") as folder,
        mooncake_store(Path(folder)) as store,
    ):
        yield RemoteStore(store.url, alone)


@contextmanager
def mooncake_client(master: str, names: Sequence[str], nbytes: int, values: Sequence[bytes] = ()) -> Iterator[Read]:
    """A read of values of `nbytes` each by a client of Mooncake's own, which stores `values` first."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    if code := client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        raise RuntimeError(f"Mooncake's client could not be set up: code {code}")
    plain = np.frombuffer(mmap(-1, len(names) * nbytes), np.uint8).reshape(len(names), nbytes)
    if code := client.register_buffer(plain.ctypes.data, plain.nbytes):
        raise RuntimeError(f"Mooncake did not register the memory: code {code}")
    places = [row.ctypes.data for row in plain]
    if values:
        for row, value in zip(plain, values, strict=True):
            row[:] = np.frombuffer(value, np.uint8)
        client.batch_put_from(list(names), places, [nbytes] * len(names))

    def read() -> None:
        if client.batch_get_into(list(names), places, [nbytes] * len(names)) != [nbytes] * len(names):
            raise RuntimeError("the values did not come back")

    try:
        yield read
    finally:
        client.close()


def plain_memory(values: Sequence[bytes]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Room for each of the values, which are of one size."""
    return np.frombuffer(mmap(-1, len(values) * len(values[0])), np.uint8).reshape(len(values), len(values[0]))


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
