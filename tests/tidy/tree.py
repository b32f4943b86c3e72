"""The repository's own files, for the house tests: where they are, never what they must look like."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kvstore_console": ROOT / "proto/kvstore_console",
    "kvstore_proto": ROOT / "proto/kvstore_proto",
    "kvstore_cuda": ROOT / "proto/kvstore_cuda",
    "kvstore_tiers": ROOT / "tiers/kvstore_tiers",
    "kvstore_predictor": ROOT / "predictor/kvstore_predictor",
    "kvstored": ROOT / "kvstore/kvstored",
    "kvstore_simulator": ROOT / "kvstore/kvstore_simulator",
    "kvstore_client": ROOT / "client/kvstore_client",
    "kvstore_restore": ROOT / "client/kvstore_restore",
    "kvstore_connectors": ROOT / "client/kvstore_connectors",
    "kvctl": ROOT / "client/kvctl",
    "kvstore_engine": ROOT / "engine/kvstore_engine",
}
# What a plain `pip install` is for.
BASE_PACKAGES = tuple(name for name in PACKAGES if name not in ("kvstore_connectors", "kvstore_engine"))
OTHER_CODE = (ROOT / "tests", ROOT / "demo", ROOT / "benchmarks")
_GENERATED = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
_SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".cu", ".proto", ".toml", ".sh"}


def modules(*packages: str) -> Iterator[Path]:
    """Hand-written Python files of the given packages (default: all)."""
    for name in packages or PACKAGES:
        yield from python_files(PACKAGES[name])


def python_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*.py")):
        if not path.name.endswith(_GENERATED):
            yield path


def all_python() -> Iterator[Path]:
    yield from modules()
    for directory in OTHER_CODE:
        yield from python_files(directory)


def all_source() -> Iterator[Path]:
    """Every hand-written source file, in any language."""
    for directory in (*PACKAGES.values(), *OTHER_CODE, ROOT / "proto", ROOT / "deploy"):
        for path in sorted(directory.rglob("*")):
            if path.suffix in _SOURCE_SUFFIXES and not path.name.endswith(_GENERATED):
                yield path


def documents() -> Iterator[Path]:
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted((ROOT / "docs").rglob("*.md"))


def pages_with_commands() -> Iterator[Path]:
    """Yield the documents and the pages beside the code that a user reads."""
    yield from (*documents(), *sorted((ROOT / "deploy").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))


def pip_installs(page: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `pip install` that a page shows, in a listing or in a sentence."""
    for typed in re.findall(r"pip install ((?:\$\([^)]*\)|[^`\n;&|()])+)", page.read_text()):
        yield shlex.split(typed.partition("  #")[0])


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def project() -> dict[str, Any]:
    """pyproject.toml, parsed."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())
