"""Python and the packages that kvstored needs: there, new enough, loadable."""

from __future__ import annotations

import importlib
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from kvctl.doctor.finding import Finding, fail, ok

DISTRIBUTION = "kvstored"
_MODULES = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "prometheus-client": "prometheus_client",
    "protobuf": "google.protobuf",
}
_REQUIREMENT = re.compile(r"^([A-Za-z0-9_.-]+)\s*>=\s*([0-9][0-9.]*)\s*$")


def python(requirements: Sequence[str] | None = None, installed: Callable[[str], str] = version) -> Iterator[Finding]:
    yield ok("python", platform.python_version())
    if requirements is None:
        try:
            requirements = requires(DISTRIBUTION) or []
        except PackageNotFoundError:
            yield fail("packages", f"{DISTRIBUTION} is not installed as a package", "pip install kvstored")
            return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)  # extras have a marker
        if match is not None:
            yield _package(match[1], match[2], installed)


def _package(name: str, least: str, installed: Callable[[str], str]) -> Finding:
    repair = f"pip install '{name}>={least}'"
    try:
        found = installed(name)
    except PackageNotFoundError:
        return fail(name, "is not installed", repair)
    if _numbers(found) < _numbers(least):
        return fail(name, f"{found}, at least {least} is needed", repair)
    try:
        importlib.import_module(_MODULES.get(name, name))
    except ImportError as error:
        return fail(name, f"{found} does not load: {error}", f"pip install --force-reinstall '{name}>={least}'")
    return ok(name, found)


def _numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "6.33.0rc1" -> (6, 33, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
