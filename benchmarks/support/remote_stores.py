"""Stores of remote tiers, each a real server of this machine, and each library's own client for a baseline."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from mmap import mmap
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tests' servers

import numpy as np

from tests.reference.own_network import own_network
from tests.reference.remote_servers import mooncake_store, redis_server, skip_without_mooncake
from tests.reference.s3_server import KEYS, s3_server

BUCKET = "blocks"
Read = Callable[[], None]


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
