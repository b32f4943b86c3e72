"""Runs a server: the port, the processes, and its end.

The module owns the life of the HTTP process. SIGTERM or one Ctrl-C drains: no new requests are taken, running ones may
finish within `drain_s`, then all processes end and the exit code is 0. A second Ctrl-C ends at once. Modules that need
the extra `server` are imported once it is known to be installed.
"""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore_console.log_format import log_to_stderr
from kvstore_console.printable import printable
from kvstore_engine.errors import UsageError
from kvstore_engine.gguf import OpenFile
from kvstore_engine.server.keys import KeyRing
from kvstore_engine.server.options import ServerOptions
from kvstore_proto.version import pip_install

if TYPE_CHECKING:
    from kvstore_engine.server.service import ServedModel

_BACKLOG = 1024
_NEEDED = ("uvicorn", "httptools", "starlette", "pydantic", "prometheus_client")
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def run_server(options: ServerOptions) -> int:
    """Run the HTTP server until a signal ends it, and return the exit status. Raises UsageError or OperationError if it
    cannot start.
    """
    _check_installed()
    from kvstore_engine.server.middleware import access_log
    from kvstore_engine.server.service import ServedModel

    log_to_stderr(logging.WARNING, "kvengine: %(levelname)s %(message)s")
    access_log.setLevel(logging.INFO if options.access_log else logging.CRITICAL)
    keys = KeyRing.read(Path(options.api_keys)) if options.api_keys else KeyRing(None)
    if keys.is_open and not _is_local(options.host):
        raise UsageError(
            f"without --api-keys only this machine is served: give --host 127.0.0.1, or keys to serve {options.host}"
        )
    with OpenFile.open(options.engine.model) as file:
        model = ServedModel.open(file, options.model_name, options.aliases)
        with _bound(options.host, options.port) as bound:
            return asyncio.run(_serve(options, keys, model, file, bound))


async def _serve(
    options: ServerOptions, keys: KeyRing, model: ServedModel, file: OpenFile, bound: socket.socket
) -> int:
    from kvstore_engine.server.app import application
    from kvstore_engine.server.connection import HttpListener
    from kvstore_engine.server.embeddings import Embeddings
    from kvstore_engine.server.engine_client import EngineClient
    from kvstore_engine.server.metrics import Metrics
    from kvstore_engine.server.service import Service

    engine = EngineClient(options.engine)
    embeddings = Embeddings(options.engine, file, options.pooling)
    service = Service(model, engine, keys, Metrics(), options.max_body_bytes, embeddings)
    stopping = asyncio.Event()
    starting, stopped = asyncio.create_task(engine.start(file)), asyncio.create_task(stopping.wait())
    _on_signals(stopping, starting.done)
    try:
        await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return 0
        starting.result()
        listener = HttpListener(application(service), bound, options.drain_s, options.max_connections)
        serving = asyncio.create_task(listener.run_until_stopped())
        _say(_address(bound), model.name)
        await asyncio.wait((serving, stopped), return_when=asyncio.FIRST_COMPLETED)
        service.is_draining.set()
        listener.should_exit = True
        await serving
        return 0
    finally:
        stopped.cancel()
        await engine.close()
        embeddings.close()


def _on_signals(stopping: asyncio.Event, has_started: Callable[[], bool]) -> None:
    def stop(number: signal.Signals) -> None:
        if stopping.is_set() and number is signal.SIGINT:
            os._exit(_INTERRUPTED)  # the other processes leave when their socket closes
        if not stopping.is_set():
            what = "finishing what runs; Ctrl-C again ends at once" if has_started() else "ending before it has served"
            print(f"kvengine: {what}", file=sys.stderr, flush=True)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)


def _bound(host: str, port: int) -> socket.socket:
    """Return a listening socket: connections made before the engine is ready wait. Raises UsageError if the address is
    taken.
    """
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise UsageError(f"no address for --host {host}: {error.strerror}") from None
    except UnicodeError:
        raise UsageError(f"no address for --host {host}: this cannot be a name") from None
    bound = socket.socket(family, kind, protocol)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        bound.listen(_BACKLOG)  # Linux lets two sockets have one address until the second listens
    except PermissionError:
        bound.close()
        raise UsageError(f"port {port} of {host} needs privileges: choose one over 1023 with --port") from None
    except OSError as error:
        bound.close()
        raise UsageError(f"cannot listen on port {port} of {host} ({error.strerror}): choose another --port") from None
    return bound


def _check_installed() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UsageError(f"the server needs {error.name}: {pip_install('server')}") from None


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _address(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _say(address: str, model: str) -> None:
    print(printable(f"kvengine: serving {model} on {address} (Ctrl-C ends)"), file=sys.stderr, flush=True)
