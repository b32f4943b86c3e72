"""Importing is cheap: the base packages load without an engine's libraries and without a warning.

Connectors (`kvstore_connectors`) are left out: each imports the engine that it is for. So are the drivers of the
remote tier, which import the library of their store, and what runs in worker processes alone.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.tidy.tree import BASE_PACKAGES

_IMPORT_ALL = """
import importlib, json, pkgutil, sys
names, before = [], set(sys.modules)  # a .pth file may have loaded some
def load(name):
    names.append(name)
    for module in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", ()), name + "."):
        left_out = module.name in (
            "kvstore_tiers.testing", "kvstore_tiers.remote.drivers",
            "kvstore_tiers.remote.encryption", "kvstore_tiers.remote.worker", "kvstored.events.worker",
            "kvstored.events.endpoint", "kvstored.events.encoding",
        )
        if not left_out and not module.name.endswith("__main__"):
            load(module.name)
for package in sys.argv[1:]:
    load(package)
print(json.dumps({"imported": names, "loaded": sorted({name.partition(".")[0] for name in set(sys.modules) - before})}))
"""
_NOT_OURS_TO_LOAD = {
    "torch", "cuda", "cupy", "kvikio", "sklearn", "redis", "mooncake", "cryptography", "obstore", "zmq", "msgspec",
    "xllamacpp", "llama_cpp", "tokenizers", "jinja2",
    "pytest", "hypothesis",
}  # fmt: skip


def _import_all(*packages: str) -> tuple[list[str], set[str]]:
    command = [sys.executable, "-W", "error", "-c", _IMPORT_ALL, *packages]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    return result["imported"], set(result["loaded"])


def test_the_base_packages_need_no_engine() -> None:
    imported, loaded = _import_all(*BASE_PACKAGES)
    assert "kvstored.daemon" in imported
    assert "kvstore_tiers.nvme.tier" in imported
    assert loaded & _NOT_OURS_TO_LOAD == set()


@pytest.mark.parametrize("package", ["kvstore_client", "kvstore_engine"])
def test_a_door_is_light(package: str) -> None:
    command = [sys.executable, "-c", f"import sys, {package}; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert package in loaded
    assert {"grpc", "numpy", "tokenizers", "xllamacpp"} & set(loaded) == set()


def test_the_daemon_loads_no_client_and_no_engine() -> None:
    command = [sys.executable, "-c", "import sys, kvstored.daemon; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"kvstore_client", "kvstore_engine", "kvstore_simulator"} & set(loaded) == set()
