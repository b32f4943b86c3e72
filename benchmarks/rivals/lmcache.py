"""LMCache beside kvstored: look up, store and retrieve a request of 2,048 tokens, 32 MiB of K/V.

Both keep it in memory only, and neither has to evict. Both gather it from paged tensors of the same shape, (2, 512, 16,
8, 64) float16 for each of 8 layers, and scatter it into them again; bytes are compared after each retrieve. Stores are
measured twice: as after a start, when LMCache's memory was never touched (ours was, by the daemon's prefault), and when
both sides' was. LMCache serves both of its transfer modes at once, over zmq: in one the engine copies into
memory that it shares with the server, in the other the server copies out of the engine's memory. Its own tool, `lmcache
bench server`, runs too, and counts where it is better.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count

from support.daemon import bench_daemon
from support.report import AT_LEAST, AT_MOST, Row, median, percentile, progress, within

from rivals.contender import WORKERS, Command, Contender, ContenderError, contender, server
from rivals.environments import LMCACHE
from rivals.turns import ECHO, LIMITS, Action, Copies, Samples, best_of, copies, echoes, of_copies, take_turns

SHAPE = "(2,512,16,8,64):float16:8"
REQUEST_MIB = 32
START_TIMEOUT_S = 60.0
L1_GB = 4
OURS, IN_PLACE = "kvstored", "kvstored in place"
IN_PLACE_FASTER = 5.0
MODES = {"LMCache engine-driven": "engine_driven", "LMCache server-driven": "lmcache_driven"}
PAUSE_S = 0.05
PROBE_LIMIT_US = 50.0
WARM_UP = 2
QUIET = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1", "LMCACHE_LOG_LEVEL": "WARNING"}
TOOL_LINE = re.compile(r"(?P<operation>LOOKUP|STORE|RETRIEVE): (?P<what>.*?)\(.*?(?P<ms>\d+\.\d+) ms")
HITS = re.compile(r"(\d+)/(\d+) chunks")


def compare(quick: bool) -> list[Row]:
    LMCACHE.ensure()
    rounds, sequences = (4, 4) if quick else (12, 12)
    arenas_mib = (3 * rounds + 6) * REQUEST_MIB
    daemon_settings = (
        f"host.capacity={arenas_mib + 512}MiB", f"host.prefault_ahead={arenas_mib}MiB", "nvme.enabled=false",
    )  # fmt: skip
    with ExitStack() as stack:
        daemon = stack.enter_context(bench_daemon(*daemon_settings))
        writable = stack.enter_context(bench_daemon(*daemon_settings, "put.in_place=true"))
        rpc_url, http_url = stack.enter_context(_lmcache_server())
        contenders = {}
        for name, each in ((OURS, daemon), (IN_PLACE, writable)):
            ours: Command = [sys.executable, WORKERS / "kvstored_client.py", each.socket_dir, "requests"]
            contenders[name] = stack.enter_context(contender(name, ours))
        for name, mode in MODES.items():
            theirs: Command = [LMCACHE.bin("python"), WORKERS / "lmcache_client.py", rpc_url, http_url, mode, SHAPE]
            contenders[name] = stack.enter_context(contender(name, theirs, QUIET))
        for each in (daemon, writable):
            each.wait_prefaulted(arenas_mib << 20)
        alone, echo = stack.enter_context(copies()), stack.enter_context(echoes())
        alone.prepare(1, REQUEST_MIB << 20)
        requests = _Requests(contenders, echo, alone)
        fresh = take_turns(requests.stores(), rounds, warm_up=1)
        requests.forget()
        _touch(contenders[next(iter(MODES))], http_url, requests=2 * (rounds + WARM_UP + sequences) + 4)
        rows = _rows(requests, rounds, 40 if quick else 100, _own_tool(rpc_url, http_url, sequences))
        in_place = in_place_row("store_32mib_fresh_memory", fresh)
        return [*speed_rows("store_32mib_fresh_memory", fresh), in_place, *rows]


def _rows(requests: _Requests, rounds: int, lookups: int, tool: dict[str, Samples]) -> list[Row]:
    """The tool's figures are a rival's like any other; its lookups come after a pause, 0.2 s."""
    stored = take_turns(requests.stores(), rounds, WARM_UP)
    retrieved = take_turns(requests.retrievals(), rounds, WARM_UP)
    busy = take_turns(requests.lookups(partial(requests.ask_many, "lookup", lookups)), rounds)
    calm = take_turns(requests.lookups(requests.look_up_after_pause), rounds * 10)
    rows = [
        *lookup_rows("lookup_8_blocks", busy),
        *lookup_rows("lookup_8_blocks_after_a_pause", {**calm, **tool["lookup"]}),
        *speed_rows("store_32mib", {**stored, **tool["store"]}),
        in_place_row("store_32mib", {**stored, **tool["store"]}),
        *speed_rows("retrieve_32mib", {**retrieved, **tool["retrieve"]}),
    ]
    probes = take_turns({OURS: partial(requests.ask_many, "probe", lookups, OURS)}, rounds)[OURS]
    if probes:
        rows.append(within("probe_8_blocks_p50", median(probes) * 1e6, "us", PROBE_LIMIT_US))
        rows.append(Row("probe_8_blocks_p99", percentile(probes, 99) * 1e6, "us", PROBE_LIMIT_US, "limit of the p50"))
    return rows


class _Requests:
    """The requests that each contender has stored; new ones for stores, those for everything else. Beside them go the
    limits: the copies alone beside stores and retrievals, an empty echo beside lookups.
    """

    def __init__(self, contenders: dict[str, Contender], echo: Contender, alone: Copies) -> None:
        self._contenders, self._echo, self._alone = contenders, echo, alone
        self._numbers = count(1)
        self.forget()

    def forget(self) -> None:
        self._stored: dict[str, list[int]] = {name: [] for name in self._contenders}

    def each(self, action: Callable[[str, int], Sequence[float]]) -> dict[str, Action]:
        return {name: partial(action, name) for name in self._contenders if name != IN_PLACE}

    def stores(self) -> dict[str, Action]:
        in_place = {IN_PLACE: partial(self.store, IN_PLACE)}
        return {**self.each(self.store), **in_place, **self._alone.beside("put", REQUEST_MIB << 20)}

    def retrievals(self) -> dict[str, Action]:
        return {**self.each(self.retrieve), **self._alone.beside("get", REQUEST_MIB << 20)}

    def lookups(self, action: Callable[[str, int], Sequence[float]]) -> dict[str, Action]:
        return {**self.each(action), ECHO: partial(action, ECHO)}

    def store(self, name: str, turn: int) -> list[float]:
        number = next(self._numbers)
        self._stored[name].append(number)
        return [self._contenders[name].ask("store", number=number)]

    def retrieve(self, name: str, turn: int) -> list[float]:
        return [self._contenders[name].ask("retrieve", number=self._known(name, turn))]

    def ask_many(self, operation: str, times: int, name: str, turn: int) -> list[float]:
        """Return the seconds of each of `times` lookups or probes, back to back; none of a probe that this version
        lacks.
        """
        if name == ECHO:
            return list(self._echo.ask(operation, number=0, times=times))
        return list(self._contenders[name].ask(operation, number=self._known(name, turn), times=times) or [])

    def look_up_after_pause(self, name: str, turn: int) -> list[float]:
        time.sleep(PAUSE_S)
        return self.ask_many("lookup", 1, name, turn)

    def _known(self, name: str, turn: int) -> int:
        return self._stored[name][turn % len(self._stored[name])]


def lookup_rows(name: str, samples: Samples, target: float = 0.2) -> list[Row]:
    """p50 and p99 in ms against the rival where its median is best, the same one in both."""
    best = best_of(samples, [key for key in samples if key != OURS and key not in LIMITS])
    return [
        Row(
            f"{name}_p{percent}", percentile(samples[OURS], percent) * 1e3, "ms",
            percentile(samples[best], percent) * 1e3, best, AT_MOST, target,
            percentile(samples[ECHO], percent) * 1e3 if ECHO in samples else None, ECHO if ECHO in samples else "",
        )
        for percent in (50, 99)
    ]  # fmt: skip


def speed_rows(name: str, samples: Samples) -> list[Row]:
    """Bytes a second of a 32 MiB request, against each mode of the rival, by its own tool where that is better."""
    gb = REQUEST_MIB * (1 << 20) / 1e9
    others = ", ".join(f"{key} {median(seconds) * 1e3:.1f} ms" for key, seconds in samples.items())
    progress(f"{name}: {others}")
    rows: list[Row] = []
    for mode, slug in MODES.items():
        best = best_of(samples, [key for key in samples if key.startswith(mode)])
        ours, theirs = gb / median(samples[OURS]), gb / median(samples[best])
        limits = of_copies(samples, gb)
        rows.append(Row(f"{name}_vs_{slug}", ours, "GB/s", theirs, best, AT_LEAST, 3.0, **limits))
    return rows


def in_place_row(name: str, samples: Samples) -> Row:
    """The put without a copy, against the better of the rival's modes."""
    gb = REQUEST_MIB * (1 << 20) / 1e9
    best = best_of(samples, [key for key in samples if key.startswith(tuple(MODES))])
    ours, theirs = gb / median(samples[IN_PLACE]), gb / median(samples[best])
    limits = of_copies(samples, gb)
    return Row(f"{name}_in_place_vs_best", ours, "GB/s", theirs, best, AT_LEAST, IN_PLACE_FASTER, **limits)


def parse_own_tool(text: str) -> dict[str, list[float]]:
    """Milliseconds by operation, as `lmcache bench server` logs them; a lookup counts when all chunks were found."""
    found: dict[str, list[float]] = {"lookup": [], "store": [], "retrieve": []}
    for line in text.splitlines():
        match = TOOL_LINE.search(line)
        if match is None:
            continue
        hits = HITS.search(match["what"])
        if hits is not None and hits[1] != hits[2]:
            continue
        found[match["operation"].lower()].append(float(match["ms"]))
    return found


def _touch(one: Contender, http_url: str, requests: int) -> None:
    """Fill as much of LMCache's memory as the run will use, and empty it: its server leaves it untouched at first."""
    for number in range(requests):
        one.ask("store", number=900_000 + number)
    request = urllib.request.Request(f"{http_url}/cache/clear", data=b"{}", method="POST")
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.read()


def _own_tool(rpc_url: str, http_url: str, sequences: int) -> dict[str, Samples]:
    """Seconds of each operation by mode, as LMCache's tool prints them: pauses, checksums and all are its own."""
    found: dict[str, Samples] = {"lookup": {}, "store": {}, "retrieve": {}}
    for start, (name, mode) in zip((100_000, 200_000), MODES.items(), strict=True):
        command = [
            LMCACHE.bin("lmcache"), "bench", "server", "--mode", "cpu", "--rpc-url", rpc_url, "--url", http_url,
            "--transfer-mode", mode, "--num-tokens", "2048", "--kvcache-shape-spec", SHAPE, "--num-blocks", "512",
            "--start", str(start), "--end", str(start + sequences), "--interval", "0.2",
        ]  # fmt: skip
        arguments, environment = [str(part) for part in command], {**os.environ, **QUIET}
        done = subprocess.run(arguments, capture_output=True, text=True, env=environment, check=False)
        figures = parse_own_tool(done.stdout + done.stderr)
        if done.returncode or not all(figures.values()):
            raise ContenderError(f"lmcache bench server ended with {done.returncode}:\n{done.stdout[-2000:]}")
        for operation, milliseconds in figures.items():
            found[operation][f"{name}, its own tool"] = [ms / 1e3 for ms in milliseconds]
    return found


@contextmanager
def _lmcache_server() -> Iterator[tuple[str, str]]:
    """RPC and HTTP addresses of a server with memory touched beforehand and nothing below it."""
    ports = _free_ports(3)
    command: Command = [
        LMCACHE.bin("lmcache"), "server", "--transport", "zmq", "--host", "127.0.0.1", "--port", ports[0],
        "--http-host", "127.0.0.1", "--http-port", ports[1], "--prometheus-port", ports[2], "--l1-size-gb",
        str(L1_GB), "--no-l1-use-lazy", "--shm-name", f"kvrivals-{os.getpid()}", "--supported-transfer-mode", "auto",
        "--eviction-policy", "LRU",
    ]  # fmt: skip
    with server("LMCache's server", command, QUIET) as log:
        http_url = f"http://127.0.0.1:{ports[1]}"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(f"{http_url}/healthcheck"):
            if time.monotonic() > deadline:
                raise ContenderError(f"LMCache's server did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield f"tcp://127.0.0.1:{ports[0]}", http_url


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(count: int) -> list[str]:
    """Ports that were free a moment ago."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [str(one.getsockname()[1]) for one in sockets]
