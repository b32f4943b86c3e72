"""The certificate of the TCP listener for unary calls: that it is served, is the file's, and does not end soon."""

from __future__ import annotations

import socket
import ssl
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.surroundings import Surroundings

SOON_DAYS = 14
_PROBE_S = 5.0
_DAY_S = 86_400
_EXPIRED = 10  # X509_V_ERR_CERT_HAS_EXPIRED


def certificate(around: Surroundings) -> Iterator[Finding]:
    """Look at what is served. Nothing without a daemon or without TLS."""
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
    """Return when a certificate ends, in seconds of the wall clock, 0 for one that has: by trusting it alone, since
    Python says what is in a certificate only of one that it trusts."""
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
    """Return whether the file at `path` has the certificate `served`; one closed to us counts as having it."""
    try:
        text = path.read_text()
    except OSError:
        return True
    return "".join(served.split()) in "".join(text.split())
