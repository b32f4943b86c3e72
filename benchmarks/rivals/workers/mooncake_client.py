"""Mooncake's side: a master, a process that holds the memory, and this client, all on one loopback.

    python mooncake_client.py MOONCAKE_MASTER SEGMENT_BYTES           starts the other two, then answers
    python mooncake_client.py hold SEGMENT_BYTES MASTER_ADDRESS       holds the memory until its input ends

Mooncake listens on 0.0.0.0, so the caller starts this in a network namespace of its own, where "lo" is all there is.
The client lends no memory itself: each value crosses the TCP loopback, as from one engine's node to a storage process.
Values move between the batch's arrays, registered once, and the store, by batch_put_from and batch_get_into.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from mooncake.store import MooncakeDistributedStore
from serving import Batch, serve

MASTER, METRICS_PORT, PORT = "127.0.0.1", 9103, 50151
START_TIMEOUT_S = 30.0
LOCAL_BUFFER_BYTES = 512 << 20


def open_store(segment_bytes: int, address: str) -> MooncakeDistributedStore:
    """A store client, once the master answers."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        store = MooncakeDistributedStore()
        code = store.setup(MASTER, "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", address)
        if code == 0:
            return store
        if time.monotonic() > deadline:
            raise SystemExit(f"Mooncake's client could not be set up: code {code}")
        time.sleep(0.2)


class Values:
    """The values of the contender Mooncake (see `kvstored_client`)."""

    def __init__(self, store: MooncakeDistributedStore) -> None:
        self._store = store
        self._batches: dict[int, Batch] = {}

    def prepare(self, values: int, value_bytes: int) -> None:
        batch = Batch(values, value_bytes)
        for array in (batch.source, batch.target):
            if code := self._store.register_buffer(array.ctypes.data, array.nbytes):
                raise RuntimeError(f"the buffer was not registered: code {code}")
        self._batches[value_bytes] = batch

    def put(self, number: int, value_bytes: int) -> float:
        batch = self._batches[value_bytes]
        batch.prepare(number)
        names, sizes = batch.names(number), [value_bytes] * batch.values
        places = [row.ctypes.data for row in batch.source]
        started = time.perf_counter()
        codes = self._store.batch_put_from(names, places, sizes)
        elapsed_s = time.perf_counter() - started
        if any(codes):
            raise RuntimeError(f"batch {number} was not stored: codes {sorted(set(codes))}")
        return elapsed_s

    def get(self, number: int, value_bytes: int) -> float:
        batch = self._batches[value_bytes]
        batch.prepare(number)
        names, sizes = batch.names(number), [value_bytes] * batch.values
        places = [row.ctypes.data for row in batch.target]
        started = time.perf_counter()
        codes = self._store.batch_get_into(names, places, sizes)
        elapsed_s = time.perf_counter() - started
        if any(code != value_bytes for code in codes):
            raise RuntimeError(f"batch {number} did not come back: codes {sorted(set(codes))}")
        batch.check(number)
        return elapsed_s

    def forget(self, number: int, value_bytes: int) -> None:
        for name in self._batches[value_bytes].names(number):
            self._store.remove(name, True)


def hold(segment_bytes: int, address: str) -> None:
    store = open_store(segment_bytes, address)
    print("holding", flush=True)
    os.dup2(2, 1)  # the parent no longer reads the pipe
    sys.stdin.read()
    store.close()


def client(master: str, segment_bytes: int) -> None:
    address = f"{MASTER}:{PORT}"
    ports = [
        f"--rpc_address={MASTER}",
        f"--rpc_port={PORT}",
        f"--metrics_host={MASTER}",
        f"--metrics_port={METRICS_PORT}",
    ]
    server = subprocess.Popen([master, *ports], stdin=subprocess.DEVNULL, stdout=sys.stderr)
    arguments = [sys.executable, __file__, "hold", str(segment_bytes), address]
    holder = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        while (line := holder.stdout.readline()) != "holding\n":
            if not line:
                raise SystemExit(f"the process that holds Mooncake's memory ended: {holder.wait()}")
        values = Values(open_store(0, address))
        serve({name: getattr(values, name) for name in ("prepare", "put", "get", "forget")})
    finally:
        for child in (holder, server):
            child.terminate()
            child.wait()


if __name__ == "__main__":
    if sys.argv[1] == "hold":
        hold(int(sys.argv[2]), sys.argv[3])
    else:
        client(sys.argv[1], int(sys.argv[2]))
