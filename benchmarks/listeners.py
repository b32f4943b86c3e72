"""Every listener filled with connections that say nothing or half a request: do engines still connect?

A row for each listener of one daemon and of `kvengine serve`: connections that were opened, how many of them the
listener kept, the bound that is configured, how many engines connected and stored a block meanwhile, and by how much
memory and descriptors of the process that listens grew. Loopback and Unix sockets of a temporary directory
alone; a listener is filled for a few seconds. The exit code is 1 where an engine could not connect or a bound was
exceeded.

    python benchmarks/listeners.py
    python benchmarks/listeners.py --connections 1000 --engines 16 --json
    python benchmarks/listeners.py --only events
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from support.daemon import BenchDaemon, bench_daemon

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the tests' model

from kvstore_client import Fingerprint, LayerGroup
from kvstore_console.table import render_table
from kvstore_proto.errors import KVStoreError
from kvstored.lifetime.holder import MAX_CONNECTIONS
from tests.reference.tiny_llama import write_tiny_llama

MODEL = Fingerprint("listeners", "w", groups=(LayerGroup(0, layers=(0,), bytes_per_token_per_layer=64),))
SETTLE_S = 1.0
SLACK = 8  # descriptors that come and go by themselves
HALF_REQUEST = b"GET /metrics HTTP/1.1\r\nHost: x\r\n"
BOUND = 32
Connect = Callable[[], socket.socket]


@dataclass(frozen=True)
class Listener:
    """`pid` listens. `bound`: of its connections; `says`: what each stranger sends."""

    name: str
    pid: int
    connect: Connect
    bound: int
    says: bytes = b""


@dataclass(frozen=True)
class Row:
    listener: str
    opened: int
    kept_descriptors: int
    bound: int
    engines: int
    engines_connected: int
    rss_growth_bytes: int

    @property
    def is_met(self) -> bool:
        return self.engines_connected == self.engines and self.kept_descriptors <= self.bound + SLACK


def over_tcp(port: int) -> Connect:
    return lambda: socket.create_connection(("127.0.0.1", port), 10)


def over_unix(path: Path, kind: int = socket.SOCK_STREAM) -> Connect:
    def connected() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, kind)
        connection.connect(str(path))
        return connection

    return connected


def listeners_of(daemon: BenchDaemon, state_dir: Path, ports: dict[str, int]) -> Iterator[Listener]:
    sockets, events = daemon.socket_dir, _child(daemon.pid, "kvstored.events.worker")
    yield Listener("handshake.sock", daemon.pid, over_unix(sockets / "handshake.sock", socket.SOCK_SEQPACKET), BOUND)
    for name in ("data.sock", "unary.sock", "admin.sock"):
        yield Listener(name, daemon.pid, over_unix(sockets / name), BOUND)
    yield Listener("unary.listen", daemon.pid, over_tcp(ports["unary"]), BOUND)
    yield Listener("metrics.listen", daemon.pid, over_tcp(ports["metrics"]), BOUND, HALF_REQUEST)
    yield Listener("events.listen", events, over_tcp(ports["events"]), BOUND)
    yield Listener("events.replay", events, over_tcp(ports["replay"]), BOUND)
    holder, path = _child(daemon.pid, "kvstored.lifetime.holder"), state_dir / "holder.sock"
    yield Listener("holder.sock", holder, over_unix(path, socket.SOCK_SEQPACKET), MAX_CONNECTIONS)


def filled(listener: Listener, daemon: BenchDaemon, connections: int, engines: int) -> Row:
    rss_bytes, descriptors = _rss_bytes(listener.pid), _descriptors(listener.pid)
    with contextlib.ExitStack() as stack:
        for _ in range(connections):
            stranger = stack.enter_context(listener.connect())
            if listener.says:
                with contextlib.suppress(OSError):  # it may be closed already: it counts as opened
                    stranger.send(listener.says)
        time.sleep(SETTLE_S)
        kept, grown_bytes = _descriptors(listener.pid) - descriptors, _rss_bytes(listener.pid) - rss_bytes
        connected = sum(_stores(daemon, number) for number in range(engines))
    _wait_until_idle(listener.pid, descriptors)
    return Row(listener.name, connections, max(0, kept), listener.bound, engines, connected, max(0, grown_bytes))


def _stores(daemon: BenchDaemon, number: int) -> bool:
    """Return whether an engine connects and stores a block."""
    tokens = np.arange(MODEL.block_tokens, dtype=np.int32) + 1000 * number
    try:
        with daemon.connect(MODEL) as session:
            stored = session.put(tokens, payloads=[np.zeros(MODEL.payload_bytes(), np.uint8)])
            return stored.statuses[0] in ("stored", "present")
    except KVStoreError as error:
        print(f"engine {number}: {error}", file=sys.stderr)
        return False


def _wait_until_idle(pid: int, descriptors: int) -> None:
    """Until the strangers are gone there too, a few seconds at most."""
    deadline = time.monotonic() + 10
    while _descriptors(pid) > descriptors + SLACK and time.monotonic() < deadline:
        time.sleep(0.1)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _rss_bytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _child(pid: int, module: str) -> int:
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if module in Path(f"/proc/{child}/cmdline").read_text():
            return int(child)
    raise SystemExit(f"the daemon has no process of {module}; is there `pip install '.[events]'`?")


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def serving(model: Path) -> Iterator[Listener]:
    """`kvengine serve` without a store."""
    port = _free_port()
    words = ["serve", "--model", str(model), "--port", str(port), "--max-connections", str(BOUND)]
    child = subprocess.Popen([sys.executable, "-m", "kvstore_engine.cli", *words], stderr=subprocess.PIPE, text=True)
    try:
        assert child.stderr is not None
        for line in child.stderr:
            if "serving" in line:
                break
        else:
            raise SystemExit(f"kvengine serve ended with {child.wait()}")
        yield Listener("kvengine serve", child.pid, over_tcp(port), BOUND, HALF_REQUEST)
    finally:
        child.terminate()
        child.wait(60)


def measure(options: argparse.Namespace) -> list[Row]:
    ports = {name: _free_port() for name in ("unary", "metrics", "events", "replay")}
    with tempfile.TemporaryDirectory(prefix="kvl-") as name, contextlib.ExitStack() as stack:
        tokens, state_dir = Path(name) / "tokens", Path(name) / "state"
        tokens.touch(0o600)
        tokens.write_text(f"uid-{os.getuid()} {hashlib.sha256(os.urandom(32)).hexdigest()}\n")
        daemon = stack.enter_context(
            bench_daemon(
                "host.capacity=64MiB", "host.min_free=0", "host.prefault=false", "nvme.enabled=false",
                f"unary.listen=127.0.0.1:{ports['unary']}", f"unary.tokens_file={tokens}",
                f"metrics.listen=127.0.0.1:{ports['metrics']}", f"events.listen=tcp://127.0.0.1:{ports['events']}",
                f"events.replay=tcp://127.0.0.1:{ports['replay']}", f"limits.handshakes_per_user={BOUND}",
                f"limits.stream_connections={BOUND}", f"limits.admin_connections={BOUND}",
                f"unary.connections={BOUND}", f"metrics.connections={BOUND}", f"events.connections={BOUND}",
                "host.warm_restart=holder", state_dir=state_dir,
            )
        )  # fmt: skip
        found = list(listeners_of(daemon, state_dir, ports))
        found.append(stack.enter_context(serving(write_tiny_llama(Path(name) / "tiny.gguf"))))
        rows = []
        for listener in found:
            if options.only in listener.name:
                print(f"filling {listener.name}", file=sys.stderr, flush=True)
                rows.append(filled(listener, daemon, options.connections, options.engines))
        return rows


def _cells(row: Row) -> tuple[str, ...]:
    numbers = str(row.opened), str(row.kept_descriptors), str(row.bound)
    memory = f"{row.rss_growth_bytes / (1 << 20):.1f} MiB"
    engines = f"{row.engines_connected} of {row.engines}"
    return row.listener, *numbers, engines, memory, "met" if row.is_met else "MISSED"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=300, help="to open to each listener (default 300)")
    parser.add_argument("--engines", type=int, default=8, help="that connect meanwhile (default 8)")
    parser.add_argument("--only", default="", metavar="TEXT", help="listeners whose name has it")
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")
    options = parser.parse_args()
    if not 0 < options.connections <= 10_000 or not 0 < options.engines <= 100:
        parser.error("--connections is 1 to 10000, --engines 1 to 100")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    rows = measure(options)
    if options.json:
        print(json.dumps([{**asdict(row), "met": row.is_met} for row in rows]))
    else:
        cells = [_cells(row) for row in rows]
        headings = ["listener", ">opened", ">descriptors", ">bound", ">engines", ">memory", ""]
        print(render_table(headings, cells))
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
