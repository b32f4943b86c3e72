"""The connection to the daemon over a client's life: connect, handshake, open a stream, and try again after a failure.

The module owns the current daemon session and its two ways of failing: *lost* (handshake or stream ended) and *silent*
(several timeouts in a row: the daemon is stopped, swapped out or overloaded). In both the connection is degraded:
`current()` returns None at once and touches no socket, while one background thread tries again with back-off. It pings
a silent daemon on its session, whose leases still stand; it reopens a broken stream; it shakes hands again only if the
handshake was lost. Back-off is exponential with full jitter (M. Brooker, "Exponential Backoff and Jitter", AWS
Architecture Blog, 2015): many engines that lost one daemon do not return in step.

It never blocks a caller, and raises only for use after close or after fork.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from typing import Any

from kvstore_client.call import CallStream, StreamHealth
from kvstore_client.daemon_session import ClientOptions, DaemonSession, open_daemon_session
from kvstore_client.errors import ConnectError, invalid

ASKED_MAX_S = 10.0  # that a daemon may ask a client to wait
SessionOpener = Callable[[ClientOptions, float, StreamHealth, DaemonSession | None], DaemonSession]
"""(options, timeout_s, health, former) -> DaemonSession, or raises ConnectError."""
Wait = Callable[[threading.Event, float], bool]
"""Wait for an event or a delay, whichever is first; True when the event came."""


class Connection:
    """The connection of one client to the daemon, which lasts over all sessions and failures. While the daemon is lost
    or silent the connection is degraded, and a background thread tries to connect again with growing pauses. It
    receives the reports of streams and calls (`StreamHealth`). Each attempt takes at most `connect_timeout_s` seconds.
    `open_session` opens a session, `wait` waits between attempts, and `rng` gives random pauses.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        connect_timeout_s: float,
        rng: random.Random,
        open_session: SessionOpener = open_daemon_session,
        wait: Wait = threading.Event.wait,
    ) -> None:
        self.options = options
        self._open = open_session
        self._connect_timeout_s = connect_timeout_s
        self._backoff = Backoff(rng)
        self._breaker = Breaker()
        self._wait = wait
        self._lock = threading.Lock()
        self._daemon: DaemonSession | None = None
        self._healthy = False
        self._retrying = False
        self._closing = threading.Event()
        self._pid = os.getpid()
        self._closed_traffic = (0, 0)
        self._asked_s = 0.0  # to wait, by the daemon
        self.reconnects = 0
        self.timeouts = 0
        self.last_error = ""

    @property
    def state(self) -> str:
        if self._closing.is_set():
            return "closed"
        return "connected" if self._healthy else "degraded"

    def current(self) -> DaemonSession | None:
        """Return the session of the daemon to use now, or None while the connection is degraded. Raises KVStoreError
        after `close`, and in a forked child.
        """
        if os.getpid() != self._pid:
            raise invalid(
                "this session belongs to the process that opened it: streams and leases do not survive fork(); "
                "call kvstore_client.connect() in the child"
            )
        if self._closing.is_set():
            raise invalid("this session is closed")
        return self._daemon if self._healthy else None

    def connect(self) -> None:
        """Make the first attempt to connect, in the caller's thread. Raises ConnectError if it fails. Unless that
        failure is permanent, a background thread then continues to try.
        """
        try:
            self._open_session()
        except ConnectError as error:
            self.last_error, self._asked_s = str(error), error.retry_after_s
            if not error.is_permanent:
                self._start_retrying()
            raise

    def statistics(self) -> dict[str, Any]:
        """Return the fields of `Statistics` that describe the connection, counted over all sessions of this client."""
        now = self._daemon.traffic_bytes() if self._daemon else (0, 0)
        return {
            "state": self.state,
            "timeouts": self.timeouts,
            "reconnects": self.reconnects,
            "last_error": self.last_error,
            "grpc_message_bytes": self._closed_traffic[0] + now[0],
            "grpc_payload_bytes": self._closed_traffic[1] + now[1],
        }

    def close(self) -> None:
        """Close the connection for good. A second call does nothing. In a forked child it only forgets the connection,
        which belongs to the parent.
        """
        self._closing.set()
        if os.getpid() != self._pid:
            return
        with self._lock:
            daemon, self._healthy = self._daemon, False
        if daemon is not None:
            daemon.close()

    # What streams and calls report

    def answered(self) -> None:
        self._breaker.answered()
        if not self._healthy and self._daemon is not None and not self._daemon.stream.ended:
            with self._lock:
                self._healthy = not self._closing.is_set()

    def timed_out(self) -> None:
        with self._lock:
            self.timeouts += 1
            self._breaker.timed_out()
            if not self._breaker.is_open or not self._healthy:
                return
            self._healthy = False
            self.last_error = "the daemon does not answer in time"
        self._start_retrying()

    def stream_ended(self, reason: str) -> None:
        with self._lock:
            self._healthy = False
            self.last_error = reason
        self._start_retrying()

    def session_ended(self, stream: CallStream, reason: str) -> None:
        daemon = self._daemon
        if daemon is not None and daemon.stream is stream:
            daemon.close()
            self.stream_ended(reason)

    # Retrying

    def _start_retrying(self) -> None:
        with self._lock:
            if self._retrying or self._closing.is_set():
                return
            self._retrying = True
        threading.Thread(target=self._retry, name="kvstore-reconnect", daemon=True).start()

    def _retry(self) -> None:
        """Try until the connection is healthy or closed."""
        while True:
            delay_s = self._backoff.next_delay_s(self._asked_s)
            self._asked_s = 0.0
            if self._wait(self._closing, delay_s):
                return
            try:
                self._attempt()
            except ConnectError as error:
                self.last_error, self._asked_s = str(error), error.retry_after_s
            with self._lock:
                if self._healthy and self._daemon is not None and not self._daemon.stream.ended:
                    self._retrying = False
                    self._backoff.reset()
                    return

    def _attempt(self) -> None:
        daemon = self._daemon
        if daemon is not None and daemon.is_alive():
            try:
                if daemon.stream.ended and not daemon.reopen_stream(self._connect_timeout_s):
                    return  # no stream now: the leases stand, so keep the session
                if not daemon.ping(self._connect_timeout_s):
                    return  # silent: likewise
                with self._lock:
                    self._healthy = not self._closing.is_set()
                return
            except ConnectError as error:
                self.last_error = str(error)
        if daemon is not None:
            daemon.close()
        self._open_session()
        self.reconnects += 1

    def _open_session(self) -> None:
        """Shake hands anew, and use that session from now on. Raises ConnectError."""
        former = self._daemon
        daemon = self._open(self.options, self._connect_timeout_s, self, former)
        with self._lock:
            if former is not None:
                past, last = self._closed_traffic, former.traffic_bytes()
                self._closed_traffic = (past[0] + last[0], past[1] + last[1])
            self._daemon = daemon
            self._healthy = not daemon.stream.ended
            self._breaker.answered()
            closing = self._closing.is_set()
        if closing:
            daemon.close()


class Backoff:
    """A source of random delays between attempts to connect. Each delay is uniform between `floor_s` and a ceiling,
    which begins at `initial_s` and doubles up to `maximum_s`.
    """

    def __init__(
        self, rng: random.Random, *, initial_s: float = 0.05, maximum_s: float = 2.0, floor_s: float = 0.01
    ) -> None:
        self._rng = rng
        self._initial_s = initial_s
        self._maximum_s = maximum_s
        self._floor_s = floor_s
        self._ceiling_s = initial_s

    def next_delay_s(self, asked_s: float = 0.0) -> float:
        """Return the next delay, at least the `asked_s` seconds that the daemon asks for, and at most twice as long as
        that and the ceiling together."""
        asked_s = min(asked_s, ASKED_MAX_S)
        delay_s = asked_s + self._rng.uniform(self._floor_s, self._ceiling_s + asked_s)
        self._ceiling_s = min(self._ceiling_s * 2, self._maximum_s)
        return delay_s

    def reset(self) -> None:
        self._ceiling_s = self._initial_s


class Breaker:
    """A counter of consecutive requests without an answer, which decides when a connection counts as degraded. It is
    open (degraded) after `limit` timeouts in a row. Any answer of the daemon closes it.
    """

    def __init__(self, limit: int = 3) -> None:
        self._limit = limit
        self._timeouts = 0

    @property
    def is_open(self) -> bool:
        return self._timeouts >= self._limit

    def timed_out(self) -> None:
        self._timeouts += 1

    def answered(self) -> None:
        self._timeouts = 0
