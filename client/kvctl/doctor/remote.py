"""Remote tiers: their packages, what the daemon says of the store, encryption, and the files with their secrets."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from kvctl.doctor.finding import Finding, fail, ok, warn
from kvctl.doctor.settings import Settings
from kvctl.doctor.sockets import user_name
from kvctl.doctor.surroundings import Surroundings

_EXTRA = "pip install 'kvstored[remote]', in the daemon's environment"
_PACKAGES = {
    "redis": "redis", "rediss": "redis", "unix": "redis", "mooncake": "mooncake", "s3": "obstore", "gs": "obstore",
    "az": "obstore", "file": "obstore",
}  # fmt: skip
_SECRET_BYTES = 32


def tiers_of(settings: Settings) -> list[str]:
    """Names of the remote tiers."""
    return [name for name in settings.tiers("remote", mark="encrypt") if f"{name}.url" in settings.values]


def tier(around: Surroundings, name: str) -> Iterator[Finding]:
    """One remote tier."""
    values = around.settings.values
    if values.get(f"{name}.enabled", "true").lower() != "true":
        yield ok(name, "switched off: nothing is written to its store or asked of it")
        return
    yield from _packages(name, values[f"{name}.url"].partition("://")[0])
    yield _state(around, name)
    yield from _encryption(around.settings, name)
    yield from _private(around, f"{name}.credentials_file")


def cluster(around: Surroundings) -> Iterator[Finding]:
    """The secret that makes nodes find each other's blocks."""
    path = _file(around.settings, "cluster.secret_file")
    if path is None:
        seen = "cluster.secret_file is not set: no other node finds this node's blocks"
        yield ok("cluster secret", seen, "to share them, give all nodes the same file: docs/remote.md")
        return
    yield from _private(around, "cluster.secret_file", least_bytes=_SECRET_BYTES)


def _packages(name: str, scheme: str) -> Iterator[Finding]:
    wanted = ["cryptography", *([_PACKAGES[scheme]] if scheme in _PACKAGES else [])]
    missing = [package for package in wanted if find_spec(package) is None]
    if missing:
        yield fail(name, f"needs {' and '.join(missing)}, not installed where kvctl runs", _EXTRA)


def _state(around: Surroundings, name: str) -> Finding:
    if around.status is None:
        return ok(name, "whether its store answers is not known: the daemon was not asked")
    for part in around.status.degraded:
        if part.part == name:
            advice = (
                "the node goes on without it, and tries again every 2 s: is the store up, its address and its "
                "credentials right, is it quicker than timeout_ms?"
            )
            return warn(name, f"its store is {part.mode}: {part.reason}", advice)
    return ok(name, "no complaint about its store (kvctl tiers shows what it has)")


def _encryption(settings: Settings, name: str) -> Iterator[Finding]:
    risk = "who can read the store can read prompts, who can write to it can forge blocks"
    if settings.values.get(f"{name}.encrypt", "true").lower() != "true":
        yield warn(
            "encryption", f"{name}.encrypt is off: {risk}", "set encrypt = true, unless the store is yours alone"
        )
    plain = [
        key.split(".")[1]
        for key, value in settings.values.items()
        if key.startswith("tenant.") and key.endswith(".remote") and value == "plain"
    ]
    if plain:
        seen = f'off for tenant {", ".join(plain)} (remote = "plain"): {risk}'
        yield warn("encryption", seen, 'set remote = "encrypted", or leave it out')


def _private(around: Surroundings, setting: str, least_bytes: int = 1) -> Iterator[Finding]:
    """A file of secrets as the daemon wants it: its own or root's, and closed to all others."""
    path = _file(around.settings, setting)
    if path is None:
        return
    name = "cluster secret" if setting.startswith("cluster.") else "credentials"
    try:
        status = path.stat()
    except FileNotFoundError:
        yield fail(name, f"{setting}: {path} does not exist", "make it, mode 0600: the daemon needs it to start")
        return
    except PermissionError:
        yield ok(name, f"{path} is closed to user {user_name(around.uid)}, as it should be")
        return
    seen = f"{path}, mode {stat.S_IMODE(status.st_mode):04o}, owner {user_name(status.st_uid)}"
    if not stat.S_ISREG(status.st_mode):
        yield fail(name, f"{setting}: {path} is not a regular file", "name a file")
    elif status.st_mode & 0o077:
        yield fail(name, f"{seen}: others can reach it; the daemon refuses that", f"chmod 600 {path}")
    elif os.access(path, os.R_OK) and len(path.read_bytes().strip()) < least_bytes:
        advice = f"head -c 32 /dev/urandom | base64 > {path}"
        yield fail(name, f"{setting}: {path} is too short, {least_bytes} bytes are needed", advice)
    else:
        yield ok(name, seen)


def _file(settings: Settings, setting: str) -> Path | None:
    """A daemon says "None" where no file is set."""
    path = settings.path(setting)
    return None if path is None or str(path) == "None" else path
