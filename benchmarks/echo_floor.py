"""What does an empty message on a direct stream cost, what on a gRPC stream, and how much of either is the socket's?

The floor under every call to the daemon: an echo server of the daemon's kind (asyncio, or grpc.aio; bytes handed back)
and the client's own stream. Baseline: the same ping over a plain Unix socket between the same two kinds of process.

Expected of gRPC: about 0.2 ms, as in a bare experiment with one thread on each side. Seen: 0.33 to 0.6 ms on two cores
against 0.006 to 0.012 for the socket. Six threads take turns in a round trip (the caller, gRPC's sender and poller, the
daemon's poller and loop, the client's reader), and on a virtual machine each waking costs tens of microseconds. A
direct stream has two, the caller and the daemon's loop: 0.08 ms, and 0.03 where both share a core.
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
    direct: list[float] = []
    over_grpc: list[float] = []
    plain: list[float] = []
    ours, theirs = socket.socketpair()
    spawning = multiprocessing.get_context("spawn")
    server = spawning.Process(target=_echo_socket, args=(theirs,), daemon=True)
    server.start()
    theirs.close()

    def ping_socket() -> None:
        ours.send(b"x")
        ours.recv(16)

    with echo("direct") as straight, echo("grpc") as through_grpc, ours:
        actions = {straight.ping: direct, through_grpc.ping: over_grpc, ping_socket: plain}
        for action in actions:
            time_each(action, WARM_UP)
        for _ in range(rounds):
            for action, seconds in actions.items():
                seconds += time_each(action, messages)
    server.join()
    progress(f"p99: direct {percentile(direct, 99) * 1e3:.3f} ms, gRPC {percentile(over_grpc, 99) * 1e3:.3f} ms")
    return [
        Row("direct_stream_echo_p50", median(direct) * 1e3, "ms", median(plain) * 1e3, "Unix socket"),
        Row("grpc_stream_echo_p50", median(over_grpc) * 1e3, "ms", median(plain) * 1e3, "Unix socket"),
        Row("direct_vs_grpc_echo_p50", median(direct) * 1e3, "ms", median(over_grpc) * 1e3, "gRPC stream echo"),
    ]


def _echo_socket(connection: socket.socket) -> None:
    while message := connection.recv(16):
        connection.send(message)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
