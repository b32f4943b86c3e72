"""What a machine lacks, by what a program said when it broke: a package that is not installed makes no answer."""

from __future__ import annotations

import re

_MODULE = re.compile(r"(?:ModuleNotFoundError|ImportError): (?:No module named '([\w.]+)'|import of ([\w.]+) halted)")
_OURS = re.compile(r"(kvstore_\w+|kvstored|kvctl|kvengine|tests|benchmarks|support)\b")
_PACKAGES = {
    "grpc": "grpcio", "grpc_health": "grpcio-health-checking", "grpc_reflection": "grpcio-reflection",
    "google": "protobuf", "cuda": "cuda-bindings", "prometheus_client": "prometheus-client",
    "pytest_timeout": "pytest-timeout",
}  # fmt: skip


def lacking(text: str) -> str:
    """Which packages are not installed, by the output of Python programs: "" where none is named, and for modules of
    this source tree."""
    found = ("".join(each).partition(".")[0] for each in _MODULE.findall(text))
    names = {name for name in found if not _OURS.match(name)}
    packages = sorted(_PACKAGES.get(name, name) for name in names)
    return f"{', '.join(packages)} {'is' if len(packages) == 1 else 'are'} not installed" if packages else ""


def why_not_imported(error: ImportError) -> str:
    """One line of an import that failed: a package, or a library that it wants."""
    return lacking(f"{type(error).__name__}: {error}") or one_line(f"{type(error).__name__}: {error}")


def one_line(text: str, most: int = 600) -> str:
    """The first and the last line of `text`, `most` characters at most."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["nothing was said"]
    both = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
    return both if len(both) <= most else f"{both[: most - 4]} ..."
