"""kvctl ping: the way an engine takes, handshake and stream, timed. Needs no operator's rights."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from kvctl.connection import open_session
from kvctl.exit_codes import FAILED, UNREACHABLE, CommandError
from kvctl.output import Output
from kvstore_console.units import human_seconds
from kvstore_proto.fingerprint import Fingerprint

_PROBE = Fingerprint(model_name="kvctl ping", weights_digest="kvctl ping")  # stores nothing


def ping(directory: Path, arguments: argparse.Namespace) -> Output:
    """Connect as a client that only reads, and send empty messages. Raises CommandError."""
    with open_session(directory, _PROBE, arguments.timeout) as session:
        trips = [session.ping(arguments.timeout) for _ in range(arguments.count)]
    times = sorted(trip for trip in trips if trip is not None)
    lost = len(trips) - len(times)
    if not times:
        raise CommandError(UNREACHABLE, f"the daemon at {directory} took the handshake but answers no ping")
    reply = {
        "pings": len(trips),
        "lost": lost,
        "min_s": times[0],
        "median_s": statistics.median(times),
        "max_s": times[-1],
    }
    text = (
        f"{len(times)} of {len(trips)} answered: min {human_seconds(times[0])}, "
        f"median {human_seconds(statistics.median(times))}, max {human_seconds(times[-1])}"
    )
    return Output(text, reply, FAILED if lost else 0)
