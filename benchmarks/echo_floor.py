"""What does an empty message on a gRPC stream cost, and how much of that is gRPC?

The floor under every call to the daemon: an echo server of the daemon's kind (grpc.aio, bytes handed back) and the
client's own stream. Baseline: the same ping over a plain Unix socket between the same two kinds of process.

Expected: about 0.2 ms, as in a bare experiment with one thread on each side. Seen: 0.46 to 0.6 ms on two cores against
0.012 for the socket. Six threads take turns in a round trip (the caller, gRPC's sender and poller, the daemon's poller
and loop, the client's reader), and on a virtual machine each waking costs tens of microseconds.
"""

from __future__ import annotations

import multiprocessing
import socket
import sys

from support.echo import echo
from support.report import Row, main, progress
from support.timing import median, percentile, time_each

WARM_UP = 200


def measure(quick: bool) -> list[Row]:
    rounds, messages = (2, 200) if quick else (5, 600)
    stream: list[float] = []
    plain: list[float] = []
    ours, theirs = socket.socketpair()
    spawning = multiprocessing.get_context("spawn")
    server = spawning.Process(target=_echo_socket, args=(theirs,), daemon=True)
    server.start()
    theirs.close()

    def ping_socket() -> None:
        ours.send(b"x")
        ours.recv(16)

    with echo() as client, ours:
        time_each(client.ping, WARM_UP)
        time_each(ping_socket, WARM_UP)
        for _ in range(rounds):
            stream += time_each(client.ping, messages)
            plain += time_each(ping_socket, messages)
    server.join()
    progress(f"stream echo p99 {percentile(stream, 99) * 1e3:.3f} ms")
    return [Row("stream_echo_p50", median(stream) * 1e3, "ms", median(plain) * 1e3, "Unix socket")]


def _echo_socket(connection: socket.socket) -> None:
    while message := connection.recv(16):
        connection.send(message)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
