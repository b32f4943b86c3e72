"""Whether there is a daemon to ask, and getting back to one that was lost.

Owns the current connection and its two ways of failing: *lost* (handshake or stream ended) and *silent*
(several timeouts in a row: stopped, swapped out, overloaded). In both the session is degraded: `current()`
answers None in well under a microsecond's worth of work and never touches a socket, while one background
thread tries again with back-off:
a silent daemon is pinged on the connection it has (its leases still stand), a broken stream is reopened, and
only a lost handshake is opened anew.
Never does: block a caller, or raise at one, except for use after close or after fork.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable

from kvstore_client.backoff import Backoff, Breaker
from kvstore_client.connection import Connection
from kvstore_client.errors import ConnectError, invalid

OpenConnection = Callable[[float, Callable[[str], None], Callable[[], None]], Connection]
"""(timeout_s, on_end, on_answer) -> Connection, or raises ConnectError."""
Wait = Callable[[threading.Event, float], bool]
"""Wait for an event or a delay, whichever is first; True when the event came."""


class Link:
    """See the module. `open` makes connections; `wait` and `rng` are injected by tests."""

    def __init__(
        self,
        open_connection: OpenConnection,
        *,
        connect_timeout_s: float,
        rng: random.Random,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self._open = open_connection
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(rng)
        self._breaker = Breaker()
        self._wait = wait
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._healthy = False
        self._mending = False
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._past_traffic = (0, 0)
        self.reconnects = 0
        self.timeouts = 0
        self.last_error = ""

    @property
    def state(self) -> str:
        if self._closing.is_set():
            return "closed"
        return "connected" if self._healthy else "degraded"

    def current(self) -> Connection | None:
        """The connection to use now, or None while degraded. Raises KVStoreError after close, and in a forked
        child.
        """
        if os.getpid() != self._pid:
            raise invalid(
                "this session belongs to the process that opened it: streams and leases do not survive fork(); "
                "call kvstore_client.connect() in the child"
            )
        if self._closing.is_set():
            raise invalid("this session is closed")
        return self._connection if self._healthy else None

    def connect(self) -> None:
        """The first attempt, in the caller's thread. Raises ConnectError, and goes on trying."""
        try:
            self._install(self._open(self._connect_timeout_s, self._ended, self._answered))
        except ConnectError as error:
            self.last_error = str(error)
            if not error.is_permanent:
                self._start_mending()
            raise

    def timed_out(self) -> None:
        """A request got no answer within its deadline."""
        with self._lock:
            self.timeouts += 1
            self._breaker.timed_out()
            if not self._breaker.is_open or not self._healthy:
                return
            self._healthy = False
            self.last_error = "the daemon does not answer in time"
        self._start_mending()

    def lost(self, connection: Connection, reason: str) -> None:
        """The daemon no longer knows our session: this connection is over, a new one is needed."""
        connection.close()
        self._ended(reason)

    def traffic_bytes(self) -> tuple[int, int]:
        """Bytes of the streams' messages and of opaque payload inside them, over all connections."""
        now = self._connection.traffic_bytes() if self._connection else (0, 0)
        return self._past_traffic[0] + now[0], self._past_traffic[1] + now[1]

    def close(self) -> None:
        """Idempotent. In a forked child only forgets: the parent's connection is not the child's to end."""
        self._closing.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            connection, self._healthy = self._connection, False
        if connection is not None:
            connection.close()

    def _answered(self) -> None:
        """From whichever thread reads, for every answer, however late."""
        self._breaker.answered()
        if not self._healthy and self._connection is not None and not self._connection.stream.ended:
            with self._lock:
                self._healthy = not self._closing.is_set()

    def _ended(self, reason: str) -> None:
        with self._lock:
            self._healthy = False
            self.last_error = reason
        self._start_mending()

    def _install(self, connection: Connection) -> None:
        with self._lock:
            if self._connection is not None:
                past, last = self._past_traffic, self._connection.traffic_bytes()
                self._past_traffic = (past[0] + last[0], past[1] + last[1])
            self._connection = connection
            self._healthy = not connection.stream.ended
            self._breaker.answered()
            closing = self._closing.is_set()
        if closing:
            connection.close()

    def _start_mending(self) -> None:
        with self._lock:
            if self._mending or self._closing.is_set():
                return
            self._mending = True
        threading.Thread(target=self._mend, name="kvstore-reconnect", daemon=True).start()

    def _mend(self) -> None:
        """Try until the link is healthy or closed."""
        while True:
            delay_s = self._backoff.next_delay_s()
            if self._wait(self._closing, delay_s):
                return
            try:
                self._attempt()
            except ConnectError as error:
                self.last_error = str(error)
            with self._lock:
                if self._healthy and self._connection is not None and not self._connection.stream.ended:
                    self._mending = False
                    self._backoff.reset()
                    return

    def _attempt(self) -> None:
        connection = self._connection
        if connection is not None and connection.is_alive():
            try:
                if connection.stream.ended and not connection.reopen_stream(self._connect_timeout_s):
                    return  # no stream now: the leases stand, so keep it
                if not connection.ping(self._connect_timeout_s):
                    return  # silent: likewise
                with self._lock:
                    self._healthy = not self._closing.is_set()
                return
            except ConnectError as error:
                self.last_error = str(error)
        if connection is not None:
            connection.close()
        self._install(self._open(self._connect_timeout_s, self._ended, self._answered))
        self.reconnects += 1
