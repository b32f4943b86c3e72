"""Importing is cheap: the base packages load without an engine's libraries and without a warning.

Connectors (`kvstore_connectors`) are left out: each imports the engine that it is for. So are the drivers of the
remote tier, which import the library of their store, and what runs in worker processes alone.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.tidy.tree import BASE_PACKAGES, PACKAGES, ROOT, python_files, relative

_IMPORT_ALL = """
import importlib, json, pkgutil, sys
names, before = [], set(sys.modules)  # a .pth file may have loaded some
def load(name):
    names.append(name)
    for module in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", ()), name + "."):
        left_out = module.name in (
            "kvstore_tiers.testing", "kvstore_tiers.remote.drivers",
            "kvstore_tiers.remote.encryption", "kvstore_tiers.remote.worker", "kvstored.events.worker",
            "kvstored.events.endpoint", "kvstored.events.encoding", "kvstore_tiers.nvme.seals",
            "kvstored.clients.tenants.data_keys",
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


_FOR_A_FEATURE = {
    "kvstored.telemetry.spans", "kvstored.rpc.verbs.traced", "kvstored.rpc.verbs.recorded", "kvstored.events",
    "kvstored.admin.metrics_endpoint", "kvstored.clients.tenants.data_keys", "kvstore_tiers.gpu",
    "kvstore_tiers.remote", "lmdb", "prometheus_client", "opentelemetry", "multiprocessing",
}  # fmt: skip


def test_the_daemon_loads_no_client_no_engine_and_nothing_for_what_is_off() -> None:
    command = [sys.executable, "-c", "import sys, kvstored.cli.serve, kvstored.daemon_process; print(*sys.modules)"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert ({"kvstore_client", "kvstore_engine", "kvstore_simulator"} | _FOR_A_FEATURE) & set(loaded) == set()


_OURS = re.compile(rf"^\s*(?:from|import) (?:{'|'.join(PACKAGES)})\b", re.MULTILINE)


def _imported(source: str) -> set[tuple[str, str]]:
    """Return each module of the project that programs in strings of `source` import, with the name taken from it."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str) and _OURS.search(node.value)):
            continue
        try:
            program = ast.parse(textwrap.dedent(node.value))
        except SyntaxError:  # prose, or a template
            continue
        for line in ast.walk(program):
            if isinstance(line, ast.ImportFrom):
                found |= {(line.module or "", alias.name) for alias in line.names}
            elif isinstance(line, ast.Import):
                found |= {(alias.name, "") for alias in line.names}
    return {(module, name) for module, name in found if module.partition(".")[0] in PACKAGES}


def _is_there(module: str, name: str) -> bool:
    """Return whether the source of `module` has `name`: a submodule, or a word at the top of its file."""
    package, _, rest = module.partition(".")
    path = Path(PACKAGES[package], *rest.split(".")) if rest else PACKAGES[package]
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return module.endswith(("_pb2", "_pb2_grpc"))
    is_submodule = (path / name).is_dir() or (path / f"{name}.py").is_file() or name.endswith(("_pb2", "_pb2_grpc"))
    return not name or is_submodule or re.search(rf"\b{name}\b", file.read_text()) is not None


@pytest.mark.slow
def test_programs_in_strings_import_names_that_are_there() -> None:
    """No linter reads the programs that tests give to other interpreters, and a rename must not forget them."""
    lost = [
        f"{relative(path)}: {module} {name}"
        for directory in (ROOT / "tests", ROOT / "benchmarks")
        for path in python_files(directory)
        for module, name in sorted(_imported(path.read_text()))
        if not _is_there(module, name) and path.parent.name != "tidy"  # whose examples break the rules
    ]
    assert lost == []
