"""The package's entry point: `connect`, for an engine that must run with or without a daemon.

The module decides once where the sockets are, how much staging memory is requested, and which failures are the caller's
mistakes. It asks for no block; `connection` reconnects.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvstore_client.arguments import UINT32_MAX, UINT64_MAX, count, one_of, positive_seconds, shown, text, truth
from kvstore_client.connection import Connection
from kvstore_client.daemon_session import DEFAULT_DEADLINE_S, ClientOptions
from kvstore_client.errors import ConnectError, DaemonUnavailable, invalid
from kvstore_client.paths import socket_directory
from kvstore_client.session import Session
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.objects import OBJECTS

if TYPE_CHECKING:
    from kvstore_client.device import DeviceMemory

DEFAULT_CONNECT_TIMEOUT_S = 0.5
MAX_NAME_BYTES = 4096  # of a client
WEIGHTS_VARIABLE = "KVSTORED_WEIGHTS"
DEFAULT_STAGING_BYTES = 72 * 1024 * 1024  # 64 blocks of 1 MiB and their headers


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    fingerprint: Fingerprint,
    client_name: str = "",
    deadline_s: float = DEFAULT_DEADLINE_S,
    connect_timeout_s: float = DEFAULT_CONNECT_TIMEOUT_S,
    required: bool = False,
    staging_bytes: int = DEFAULT_STAGING_BYTES,
    prefault: bool = False,
    stream: Literal["direct", "grpc"] = "direct",
    device: int | DeviceMemory | None = None,
    exact: bool = True,
    pool: str = "",
    rng: random.Random | None = None,
) -> Session:
    """Return a session with the daemon whose sockets are in the directory `socket` (default: $KVSTORED_SOCKET_DIR, or
    /run/kvstored).

    If no daemon answers within `connect_timeout_s` seconds, the session is returned degraded and reconnects by itself;
    with `required=True`, DaemonUnavailable is raised instead. If a daemon refuses `fingerprint`, the protocol or the
    user for good, KVStoreError is raised in both cases. $KVSTORED_WEIGHTS, such as policy:7, names weights for a
    fingerprint without any. `deadline_s` is the time for a call without its own.
    `staging_bytes` is the shared memory for puts; with 0 the session only reads. `prefault` enters leased pages into
    the page table at each get. `stream="grpc"` uses the gRPC stream even if the daemon has a direct one, which is four
    times as fast. `device` is the CUDA device of the engine, counted as in this process; leases may then name blocks in
    a GPU tier (`Lease.device_address`). KVStoreError is raised if it cannot be used. An engine with several sessions
    passes one DeviceMemory to all. `exact=False` accepts lossy copies where the tenant allows them: leases may have
    some (`Lease.error_bound`), and some may be made of what this session puts. `pool` names a shared pool of the
    daemon's configuration: the session is about its blocks, and only a session of its publisher can change them.
    """
    if not isinstance(fingerprint, Fingerprint):
        raise invalid(f"fingerprint must be a Fingerprint, got {type(fingerprint).__name__}")
    fingerprint = _with_weights(fingerprint)
    connect_timeout_s = positive_seconds("connect_timeout_s", connect_timeout_s)
    options = ClientOptions(
        _directory(socket),
        fingerprint,
        text("client_name", client_name, MAX_NAME_BYTES),
        count("staging_bytes", staging_bytes, most=UINT64_MAX),
        positive_seconds("deadline_s", deadline_s),
        prefers_grpc=one_of("stream", stream, ("direct", "grpc")) == "grpc",
        device=_device_memory(device),
        exact=truth("exact", exact),
        pool=text("pool", pool, MAX_NAME_BYTES),
    )
    connection = Connection(options, connect_timeout_s=connect_timeout_s, rng=rng or random.Random())
    try:
        connection.connect()
    except ConnectError as error:
        if error.is_permanent and error.refused_as is not None:
            connection.close()
            raise KVStoreError(error.refused_as, str(error)) from None
        if required:
            connection.close()
            raise DaemonUnavailable(
                str(error), is_denied=error.is_denied, is_refused=error.refused_as is not None
            ) from None
    return Session(connection, prefault=prefault)


def _directory(socket: str | os.PathLike[str] | None) -> Path:
    try:
        directory = socket_directory(socket)
        is_path = b"\0" not in os.fsencode(directory)
    except (TypeError, ValueError):
        is_path = False
    if not is_path:
        raise invalid(f"socket must be the path of a directory, got {shown(socket)}")
    return directory


def _device_memory(device: int | DeviceMemory | None) -> DeviceMemory | None:
    if device is None or (not isinstance(device, int) and hasattr(device, "mappings")):
        return device
    number = count("device", device, most=UINT32_MAX)
    from kvstore_client.device import DeviceMemory

    return DeviceMemory(number)


def _with_weights(fingerprint: Fingerprint) -> Fingerprint:
    """Return `fingerprint` with the weights and the version that the environment variable KVSTORED_WEIGHTS names, such
    as policy:7, where it names none itself. Objects do not depend on weights."""
    said = os.environ.get(WEIGHTS_VARIABLE, "")
    if not said or fingerprint.weights or fingerprint == OBJECTS:
        return fingerprint
    name, _, version = said.rpartition(":")
    if not name or not version.isdecimal():
        raise invalid(f"{WEIGHTS_VARIABLE} must be NAME:VERSION, such as policy:7, got {shown(said)}")
    return replace(fingerprint, weights=name, weights_version=int(version))
