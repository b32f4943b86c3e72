"""The real daemon in this process, on a loop of its own in a thread, with a clock that the test moves: sockets, copy
threads and disk are real, so what a client does is what it does elsewhere, but every decision falls at a known time.

Owns the thread and the daemon's directory. Never moves the clock by itself.
"""

from __future__ import annotations

import asyncio
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import grpc

import kvstore_client
from kvstore_client import Session
from kvstore_proto.v1 import admin_pb2, admin_pb2_grpc
from kvstored import __version__
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.config import load_config
from kvstored.daemon import Daemon
from kvstored.state.process import StateProcess
from tests.reference.conversations import model
from tests.reference.running_daemon import MIB, PATIENCE_S, SMALL, eventually

Answer = TypeVar("Answer")


class ClockedDaemon:
    """`clock` may only be moved on while nothing is asked."""

    def __init__(self, directory: Path, *settings: str) -> None:
        places = (f"daemon.socket_dir={directory}/run", f"daemon.state_dir={directory}/state")
        self.clock = ManualClock(1000 * NS_PER_S)
        self._config = load_config(None, [*SMALL, *places, *settings])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="clocked daemon", daemon=True)
        self._state = StateProcess(self._config.daemon.state_dir, __version__, self.clock)
        self.daemon = Daemon(self._config, self.clock, lambda: None, lambda: self._config, self._state)

    def start(self) -> None:
        self._state.start()
        self._thread.start()
        self._wait(self.daemon.start())

    def stop(self) -> None:
        self._wait(self.daemon.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def ask(self, question: Callable[[Any], Answer]) -> Answer:
        """`question(store)`, on the daemon's own thread."""

        async def answer() -> Answer:
            return question(self.daemon.store)

        return self._wait(answer())

    def is_still(self) -> bool:
        """Return whether every lease has been given back and nothing moves."""
        return self.ask(
            lambda store: (
                not (
                    len(store.leases)
                    or store.completions.outstanding
                    or (store.writeback and store.writeback.pending())
                    or any(sharing.waiting for sharing in store.sharing)
                )
            )
        )

    def settle(self) -> None:
        assert eventually(self.is_still)

    @property
    def socket_dir(self) -> Path:
        return self._config.daemon.socket_dir

    def drop(self, tier: str) -> admin_pb2.DropReply:
        with grpc.insecure_channel(f"unix:{self.socket_dir}/admin.sock") as channel:
            stub = admin_pb2_grpc.AdminStub(channel)  # type: ignore[no-untyped-call]
            reply: admin_pb2.DropReply = stub.Drop(admin_pb2.DropRequest(tier=tier), timeout=PATIENCE_S)
            return reply

    def connect(self) -> Session:
        return kvstore_client.connect(
            self.socket_dir, fingerprint=model(), required=True, deadline_s=PATIENCE_S,
            connect_timeout_s=PATIENCE_S, staging_bytes=2 * MIB,
        )  # fmt: skip

    def _wait(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)


@contextmanager
def clocked_daemon(*settings: str) -> Iterator[ClockedDaemon]:
    with tempfile.TemporaryDirectory(prefix="kvc-") as directory:
        daemon = ClockedDaemon(Path(directory), *settings)
        daemon.start()
        try:
            yield daemon
        finally:
            daemon.stop()
