"""How fast does a daemon get 64 blocks of 1 MiB that are in a remote store alone?

Against the same bytes read into plain memory by the library's own client, in turns with it: redis-py's MGET, obstore
with 64 requests at once, Mooncake's batch_get_into. What a get does beyond it: it asks which blocks are there, opens
and verifies each, and copies it into memory that clients map. Once with values as they are, once encrypted. Stores that
cannot run here are named and left out.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.blocks import model, payloads, tokens_of
from support.daemon import BenchDaemon, bench_daemon
from support.remote_stores import RemoteStore, mooncake, redis_store, s3_store
from support.report import AT_LEAST, Row, main, progress
from support.timing import median, time_once

from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2

BLOCKS, BLOCK_BYTES = 64, 1 << 20
GIB = BLOCKS * BLOCK_BYTES / 2**30
PLAIN_TARGET, ENCRYPTED_TARGETS = 0.85, {"redis": 0.6, "s3": 0.6}
MODEL = model(BLOCK_BYTES)
PATIENCE_S = 60.0
STORES: dict[str, Callable[[], AbstractContextManager[RemoteStore]]] = {
    "redis": redis_store, "mooncake": mooncake, "s3": s3_store,
}  # fmt: skip


def measure(quick: bool) -> list[Row]:
    rows = []
    for name, start in STORES.items():
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


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
