"""The daemon itself: whether it answers an operator and an engine, has the installed version, has the secret that its
blocks were stored under, and serves a certificate that does not end soon.
"""

from __future__ import annotations

import os
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvctl.doctor.sockets import how_to_start, user_name
from kvctl.doctor.surroundings import Finding, Surroundings, fail, ok, warn
from kvctl.output import DENIED, CommandError
from kvstore_client.entry import connect
from kvstore_client.errors import DaemonUnavailable
from kvstore_client.handshake import PROTOCOL_VERSION
from kvstore_client.paths import HANDSHAKE_SOCKET
from kvstore_console.units import human_bytes, human_seconds
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.state_identity import SECRET_FILE, read_ownership

_PROBE = Fingerprint(model_name="kvctl doctor", weights_digest="kvctl doctor")  # stores nothing
_PINGS = 20
_SLOW_S = 0.005
SOON_DAYS = 14
_PROBE_S = 5.0
_DAY_S = 86_400
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


def answering(around: Surroundings, trouble: CommandError | None) -> Iterator[Finding]:
    """Yield findings about the daemon's answer on the admin socket. `trouble` is the error if there was no answer,
    otherwise None.
    """
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
    """Check that the daemon accepts a handshake and a stream, which engines begin with."""
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


def secret(around: Surroundings) -> Iterator[Finding]:
    state_dir = around.settings.path("daemon.state_dir")
    if state_dir is None:
        return
    try:
        nvme_dir = around.settings.path("nvme.path") if around.settings.flag("nvme.enabled") else None
        found = read_ownership(state_dir, nvme_dir)
    except PermissionError:
        seen = f"{state_dir / SECRET_FILE} is closed to user {user_name(around.uid)}, as it should be"
        yield ok("secret", seen, "sudo kvctl doctor compares it with the blocks")
        return
    if found.problem:
        seen, _, advice = found.problem.partition(": ")
        yield fail("secret", f"{seen}; the daemon will refuse to start", advice)
    elif found.secret is None:
        yield ok("secret", f"{state_dir / SECRET_FILE} does not exist yet; the daemon makes it")
    else:
        yield ok("secret", "it is the one that the blocks were stored under", "keep a copy of it with your backups")


def certificate(around: Surroundings) -> Iterator[Finding]:
    """Check the TLS certificate that the daemon uses. Yield nothing if there is no daemon, or it does not use TLS."""
    listen, path = around.settings.values.get("unary.listen", ""), around.settings.path("unary.tls_cert")
    if around.status is None or not listen or path is None:
        return
    host, _, port = listen.rpartition(":")
    try:
        served = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=_PROBE_S)
        ends_s = _end_of(served, host.strip("[]"), int(port))
    except OSError as error:
        yield fail("certificate", f"{listen} serves none: {error}", "look at the daemon's log")
        return
    left_days = (ends_s - time.time()) / _DAY_S
    if left_days <= 0:
        yield fail("certificate", f"{listen} serves one that has ended", f"renew {path}, then kvctl reload")
    elif not _is_in(served, path):
        yield warn("certificate", f"{listen} serves another one than {path} has", "kvctl reload serves the new one")
    elif left_days < SOON_DAYS:
        yield warn("certificate", f"it ends in {left_days:.0f} days", f"renew {path}, then kvctl reload")
    else:
        yield ok("certificate", f"it ends in {left_days:.0f} days")


def _end_of(served: str, host: str, port: int) -> float:
    """Return when a certificate ends, in seconds since the epoch; 0 if it has ended. The certificate is the only one
    trusted here, since Python shows the fields of trusted certificates only.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(["h2"])
    with tempfile.NamedTemporaryFile("w", suffix=".pem") as trusted:
        trusted.write(served)
        trusted.flush()
        context.load_verify_locations(trusted.name)
    try:
        with socket.create_connection((host, port), _PROBE_S) as plain, context.wrap_socket(plain) as connection:
            found = connection.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return 0.0
        raise
    return float(ssl.cert_time_to_seconds(str(found["notAfter"])))


def _is_in(served: str, path: Path) -> bool:
    """Return whether the file at `path` has the certificate `served`; a file that this user cannot read counts as
    having it.
    """
    try:
        text = path.read_text()
    except OSError:
        return True
    return "".join(served.split()) in "".join(text.split())
