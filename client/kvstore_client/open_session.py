"""The life of a session: its connection, its state and its end. Requests about blocks are `session`'s."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

from kvstore_client.arguments import seconds
from kvstore_client.connection import Connection
from kvstore_client.errors import invalid
from kvstore_client.prefix import KeyedPrefix, prefix_of
from kvstore_client.results import ClientCounters, Statistics
from kvstore_proto.identity import BlockKeys
from kvstore_proto.token_ids import TokenIds
from kvstore_proto.v1 import kvstore_pb2 as wire

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory


class OpenSession:
    """A session without its requests about blocks. It may be used from several threads, but not across fork."""

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
        """The tenant that owns the blocks, by the daemon's name for it; "" while degraded."""
        daemon = self._connection.current()
        return "" if daemon is None else daemon.tenant

    @property
    def state(self) -> str:
        """ "connected", "degraded" (every lookup is a miss; it reconnects by itself) or "closed"."""
        return self._connection.state

    @property
    def device(self) -> DeviceMemory:
        """The device that the session was opened with, for `kvstore_client.device.DeviceTransfers`. Raises KVStoreError
        if there is none."""
        device = self._connection.options.device
        if device is None:
            raise invalid("this session was opened without a device: connect(..., device=0)")
        return device

    def ping(self, deadline_s: float | None = None) -> float | None:
        """Return the seconds of one empty round trip on the stream; None if there was no answer in time."""
        timeout_s, daemon = self._deadline(deadline_s), self._connection.current()
        if daemon is None:
            return None
        started = self._clock()
        answer = daemon.call(wire.Request(ping=wire.Ping()), timeout_s)
        return None if isinstance(answer, str) else self._clock() - started

    def wake(self) -> None:
        """Announce that a call is about to follow; waits for nothing. The first round trip after a pause takes several
        times as long as the next; if this is called when a prompt arrives, that time passes while it is tokenized."""
        daemon = self._connection.current()
        if daemon is not None:
            daemon.stream.submit(wire.Request(ping=wire.Ping())).abandon()

    def keys(self, tokens: TokenIds, group: int | None = None) -> BlockKeys | None:
        """Return the keys of the full blocks of a prefix; None while degraded (the root comes from the daemon)."""
        prefix = self._prefix(tokens, None, group)
        return None if prefix is None else prefix.chain.keys

    def statistics(self) -> Statistics:
        return Statistics(**self._connection.statistics() | self._counters.read())

    def close(self) -> None:
        """End the session: leases end; views stay readable memory without a promise about their content."""
        try:
            while self._before_close:
                self._before_close.pop()()
        finally:
            self._connection.close()

    def before_close(self, work: Callable[[], object]) -> None:
        """Register `work` to be called by `close`, while the session can still be used; the last one registered is
        called first."""
        self._before_close.append(work)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _prefix(self, tokens: TokenIds | None, keys: BlockKeys | None, group_id: int | None) -> KeyedPrefix | None:
        return prefix_of(self._connection, tokens, keys, group_id)

    def _deadline(self, deadline_s: float | None) -> float:
        return self._deadline_s if deadline_s is None else seconds("deadline_s", deadline_s)
