"""The daemon itself: does it answer an operator and an engine, and is it the version that is installed?"""

from __future__ import annotations

import os
from collections.abc import Iterator

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.running import how_to_start
from kvctl.doctor.surroundings import Surroundings
from kvctl.exit_codes import DENIED, CommandError
from kvstore_client.entry import connect
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.handshake import PROTOCOL_VERSION
from kvstore_client.paths import HANDSHAKE_SOCKET
from kvstore_console.units import human_bytes, human_seconds
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint

_PROBE = Fingerprint(model_name="kvctl doctor", weights_digest="kvctl doctor")  # stores nothing
_PINGS = 20
_SLOW_S = 0.005


def answering(around: Surroundings, trouble: CommandError | None) -> Iterator[Finding]:
    """On the admin socket. `trouble` is why there was no answer."""
    status = around.status
    if status is None:
        if trouble is not None and trouble.exit_code == DENIED:
            yield warn("admin", "not asked: the admin socket is closed to you", str(trouble))
        else:
            reason, nothing_listens, _ = str(trouble).partition("; start it with")
            if nothing_listens:
                yield fail("admin", f"no answer: {reason}", how_to_start(around))
            else:  # a daemon listens, and is slow or stopped
                yield fail("admin", "no answer", reason)
        return
    seen = f"pid {status.pid} answers, {status.state}, up {human_seconds(status.uptime_s)}"
    if status.state == "serving":
        yield ok("admin", seen)
    else:
        yield warn("admin", seen, "it takes no new clients: `kvctl drain --undo`, or wait until it has stopped")
    for warning in status.warnings:
        yield warn("says", warning, "see the daemon's log")
    done_bytes, total_bytes = status.prefault_done_bytes, status.prefault_total_bytes
    if done_bytes < total_bytes:
        seen = f"{human_bytes(done_bytes)} of {human_bytes(total_bytes)} touched so far"
        yield ok("prefault", seen, "puts into untouched memory take four times as long; this ends by itself")


def versions(around: Surroundings, installed: str) -> Iterator[Finding]:
    status = around.status
    if status is None:
        return
    if status.protocol_version != PROTOCOL_VERSION:
        yield fail(
            "protocol",
            f"the daemon speaks {status.protocol_version}, this client {PROTOCOL_VERSION}",
            "install the same kvstored on both sides",
        )
    elif status.version != installed:
        yield warn(
            "version",
            f"the daemon is {status.version}, installed is {installed}",
            "restart the daemon to run what is installed (`kvctl drain`, then restart it)",
        )
    else:
        yield ok("version", f"{status.version}, protocol {status.protocol_version}, on both sides")


def as_an_engine(around: Surroundings, timeout_s: float) -> Iterator[Finding]:
    """Handshake and stream, the way that engines take."""
    if around.status is None and not os.path.exists(around.socket_dir / HANDSHAKE_SOCKET):
        return
    try:
        session = connect(
            around.socket_dir,
            fingerprint=_PROBE,
            client_name="kvctl doctor",
            connect_timeout_s=timeout_s,
            required=True,
            staging_bytes=0,
        )
    except (DaemonUnavailable, KVStoreError) as error:
        yield fail("engine's way", error.message, "engines run without a cache until this is repaired")
        return
    with session:
        trips = sorted(trip for trip in (session.ping(timeout_s) for _ in range(_PINGS)) if trip is not None)
    if not trips:
        yield fail(
            "engine's way", "the handshake was taken, but no ping is answered", "look at the daemon's log, restart it"
        )
        return
    median_s = trips[len(trips) // 2]
    seen = f"{len(trips)} of {_PINGS} pings answered, median {human_seconds(median_s)}"
    if median_s > _SLOW_S or len(trips) < _PINGS:
        yield warn("engine's way", seen, "the machine is overloaded: leave a core to the daemon (engine threads - 1)")
    else:
        yield ok("engine's way", seen)
