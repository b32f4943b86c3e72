"""The servers of a comparison: this engine's and llama.cpp's, each in processes of its own on a port of its own.

The module owns their start, their readiness and their end. llama.cpp's default is `llama-server` with no option but the
model and the threads: four slots over one unified K/V, the model's whole context, flash attention if it can. Its best
on CPUs, as measured here and by others, is `-fa off -no-kvu -np N -c ...`: a slot for each client.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore_engine.bench.child import ServerChild
from kvstore_engine.bench.ggml_build import family, mapped_libraries
from kvstore_engine.errors import OperationError

DEFAULT_SLOTS = 4
_START_S = 180.0
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class LlamaServerSettings:
    """The settings of llama.cpp's server. `flash` turns flash attention on or off; None uses it if possible. `context`
    None is the model's own. With `unified` all sequences share one K/V buffer. `cache_ram_mib` is the size in MiB of
    its prompt cache in DRAM.
    """

    threads: int
    sequences: int = DEFAULT_SLOTS
    context: int | None = None
    flash: bool | None = None
    unified: bool = True
    cache_ram_mib: int = 8192  # its default

    def command(self) -> list[str]:
        """Return these settings as command-line options of the program `llama-server`. Settings at their default are
        left out.
        """
        options = ["-t", str(self.threads)]
        if self == LlamaServerSettings(self.threads):
            return options
        options += ["-np", str(self.sequences), "-kvu" if self.unified else "-no-kvu"]
        options += ["-fa", {True: "on", False: "off", None: "auto"}[self.flash]]
        options += ["-c", str(self.context)] if self.context else []
        return [*options, "--cache-ram", str(self.cache_ram_mib)]


def best_on_cpus(threads: int, sequences: int, context: int) -> LlamaServerSettings:
    """Return the fastest settings of llama.cpp's server on processors, for `sequences` sequences of `context` tokens
    each.
    """
    return LlamaServerSettings(threads, sequences, context * sequences, False, False)


@dataclass(frozen=True, slots=True)
class Running:
    """A server process that answers at `url`. `pid` is its process number."""

    url: str
    pid: int

    def libraries(self) -> frozenset[Path]:
        """Return the paths of the ggml libraries that the server's processes have loaded."""
        return mapped_libraries(family(self.pid))


@contextlib.contextmanager
def our_server(
    model: Path, threads: int, options: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[Running]:
    """Run `kvengine serve` with `model` on a free port for the time of a `with` block, and give the block its
    address.
    """
    port = free_port()
    command = [sys.executable, "-m", "kvstore_engine.cli", "serve", "--model", str(model), "--port", str(port)]
    with _program([*command, "--threads", str(threads), *options], port, environment) as running:
        yield running


@contextlib.contextmanager
def llama_server(model: Path, settings: LlamaServerSettings, program: Path | None = None) -> Iterator[Running]:
    """Run llama.cpp's server with `model` for the time of a `with` block, and give the block its address. `program` is
    the path of the server; None takes the one in the wheel `xllamacpp`.
    """
    if program is None:
        child = ServerChild("kvstore_engine.bench.llama_wheel", [str(model), json.dumps(asdict(settings))])
        with contextlib.closing(child):
            address = child.ask({})
            running = Running(str(address), child.pid)
            _wait(running.url, lambda: None)
            _check_slots(running, settings)
            yield running
        return
    port = free_port()
    command = [str(program), "-m", str(model), "--host", "127.0.0.1", "--port", str(port), *settings.command()]
    with _program(command, port, None) as running:
        if settings != LlamaServerSettings(settings.threads):  # its default differs by release
            _check_slots(running, settings)
        yield running


def _check_slots(running: Running, settings: LlamaServerSettings) -> None:
    """Check that the server runs with its settings, which are read back from it."""
    with urllib.request.urlopen(f"{running.url}/props", timeout=30) as answer:
        seen = json.load(answer).get("total_slots")
    if seen != settings.sequences:
        raise OperationError(f"llama.cpp's server has {seen} slots, {settings.sequences} were asked for")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextlib.contextmanager
def _program(command: Sequence[str], port: int, environment: Mapping[str, str] | None) -> Iterator[Running]:
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
            )
        except OSError as error:
            raise OperationError(f"{command[0]} cannot be run: {error.strerror}") from None

        def check() -> None:
            if process.poll() is not None:
                log.seek(0)
                last = ([line for line in log.read().splitlines() if line.strip()] or ["it said nothing"])[-1]
                raise OperationError(f"the server ended with exit code {process.returncode} while starting: {last}")

        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, check)
            yield Running(url, process.pid)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(url: str, check: Callable[[], None]) -> None:
    """Wait until /health says yes."""
    deadline = time.monotonic() + _START_S
    host, _, port = url.removeprefix("http://").partition(":")
    while time.monotonic() < deadline:
        check()
        connection = http.client.HTTPConnection(host, int(port), timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    raise OperationError(f"the server at {url} was not ready within {_START_S:g} s")
