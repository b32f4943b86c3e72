"""The life of a session: its connection, its state and its end. Requests about blocks are `session`'s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from kvstore_client.arguments import seconds
from kvstore_client.connection import Connection
from kvstore_client.daemon_session import DaemonSession
from kvstore_client.errors import invalid
from kvstore_client.prefix import KeyedPrefix, prefix_of
from kvstore_client.results import ClientCounters, Statistics
from kvstore_proto.identity import BlockKeys
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import kvstore_pb2 as wire

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory


class OpenSession:
    """The base of `Session`: the connection to the daemon, its state and its end, without the requests about blocks. It
    may be used from several threads, but not across fork.
    """

    def __init__(
        self, connection: Connection, *, prefault: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._connection = connection
        self._counters = ClientCounters()
        self._deadline_s = connection.options.deadline_s
        self._prefault = prefault
        self._clock = clock
        self._before_close: list[Callable[[], object]] = []
        self.fingerprint = connection.options.fingerprint

    @property
    def block_tokens(self) -> int:
        return self.fingerprint.block_tokens

    @property
    def tenant(self) -> str:
        """The daemon's name of the tenant that owns the blocks, or "" while the session is degraded."""
        daemon = self._connection.current()
        return "" if daemon is None else daemon.tenant

    @property
    def state(self) -> str:
        """The state of the connection: "connected", "degraded" (there is no daemon now: every lookup misses, and the
        session reconnects by itself) or "closed".
        """
        return self._connection.state

    @property
    def daemon(self) -> DaemonSession | None:
        """The present session with the daemon, for this package's own requests, or None while there is none."""
        return self._connection.current()

    @property
    def device(self) -> DeviceMemory:
        """The CUDA device that the session was opened with, for `kvstore_client.device.DeviceTransfers`. Raises
        KVStoreError if it was opened without one.
        """
        device = self._connection.options.device
        if device is None:
            raise invalid("this session was opened without a device: connect(..., device=0)")
        return device

    def ping(self, deadline_s: float | None = None) -> float | None:
        """Send an empty request to the daemon, and return the seconds until its answer. Return None if there was no
        answer within `deadline_s` seconds.
        """
        timeout_s, daemon = self._deadline(deadline_s), self._connection.current()
        if daemon is None:
            return None
        started = self._clock()
        answer = daemon.call(wire.Request(ping=wire.Ping()), timeout_s)
        return None if isinstance(answer, str) else self._clock() - started

    def wake(self) -> None:
        """Prepare the daemon for a call that follows soon, without waiting. The first round trip after a pause takes
        several times as long as the next, so call this when a prompt arrives, before you tokenize it.
        """
        daemon = self._connection.current()
        if daemon is not None:
            daemon.stream.submit(wire.Request(ping=wire.Ping())).abandon()

    def keys(self, tokens: TokenIds, group: int | None = None) -> BlockKeys | None:
        """Return the keys of the full blocks of the prefix `tokens` in the layer group `group` (by default the first).
        Return None while the session is degraded, because the keys start from a secret that the daemon sends.
        """
        prefix = self._prefix(tokens, None, group)
        return None if prefix is None else prefix.chain.keys

    def statistics(self) -> Statistics:
        return Statistics(**self._connection.statistics() | self._counters.read())

    def close(self) -> None:
        """End the session and its leases. Arrays over leased blocks may still be read, but their content may change."""
        try:
            while self._before_close:
                self._before_close.pop()()
        finally:
            self._connection.close()

    def before_close(self, work: Callable[[], object]) -> None:
        """Register `work` to be called by `close` while the session can still be used. The function that was registered
        last is called first.
        """
        self._before_close.append(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefix(self, tokens: TokenIds | None, keys: BlockKeys | None, group_id: int | None) -> KeyedPrefix | None:
        return prefix_of(self._connection, tokens, keys, group_id)

    def _deadline(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else seconds("deadline_s", deadline_s)
