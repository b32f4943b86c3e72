"""The settings of a tenant that say who is that tenant beside uid and gid: cgroups, a socket of its own, names in a
certificate; and the settings that make it a shared pool. Settings that contradict each other are errors here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstored.config.mistakes import ConfigError, need
from kvstored.config.schema import TenantSection

RECOGNITION_KEYS = ("cgroups", "socket", "certificates", "publisher", "readers")
TENANTS = "tenants"  # in the socket directory: directories with sockets of one tenant each
CERTIFICATE_KINDS = ("dns", "uri", "cn")
_CGROUP = re.compile(r"(/[^/\n]+)+\Z")


def recognition(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a `TenantSection` that this module reads from `entry`, the TOML table of one tenant. Raises
    TypeError for a value of a wrong type or form."""
    socket, publisher = entry.get("socket", False), entry.get("publisher", "")
    if not isinstance(socket, bool):
        raise TypeError(f"socket must be true or false, got {socket!r}")
    if not isinstance(publisher, str):
        raise TypeError(f"publisher must be the name of a tenant, got {publisher!r}")
    cgroups = _texts(entry, "cgroups", '["/chat.slice"]')
    for path in cgroups:
        if not _CGROUP.match(path) or not {".", ".."}.isdisjoint(path.split("/")):
            raise TypeError(
                f"cgroups: {path!r} is no cgroup's path below the root: write it as /proc/PID/cgroup shows it behind "
                "0::, such as /chat.slice"
            )
    certificates = _texts(entry, "certificates", '["dns:chat.example"]')
    for name in certificates:
        kind, _, value = name.partition(":")
        if kind not in CERTIFICATE_KINDS or not value or "*" in value:
            raise TypeError(
                f"certificates: {name!r}: write dns:NAME, uri:URI or cn:NAME, whole names without wildcards"
            )
    return {
        "cgroups": cgroups,
        "socket": socket,
        "certificates": tuple(name.lower() if name.startswith("dns:") else name for name in certificates),
        "publisher": publisher,
        "readers": _texts(entry, "readers", '["batch"]'),
    }


def check_recognition(tenants: Sequence[TenantSection]) -> None:
    """Check that no caller is two tenants by the settings of `tenants`, and that pools are used by tenants that there
    are. Raises ConfigError."""
    owners: dict[str, str] = {}
    by_name = {tenant.name: tenant for tenant in tenants}
    for tenant in tenants:
        for key, what in (("cgroups", "cgroup"), ("certificates", "certificate")):
            for value in getattr(tenant, key):
                if owners.setdefault(f"{key} {value}", tenant.name) != tenant.name:
                    other = owners[f"{key} {value}"]
                    raise ConfigError(f"tenant {tenant.name}: {what} {value} is listed by tenant {other} already")
        _check_pool(tenant, by_name)


def _check_pool(tenant: TenantSection, by_name: Mapping[str, TenantSection]) -> None:
    name = tenant.name
    if not tenant.is_pool:
        need(not tenant.readers, f"tenant {name}: readers belong to a shared pool: name its publisher too")
        return
    for key in ("uids", "gids", "unmapped", "cgroups", "socket", "certificates"):
        need(
            not getattr(tenant, key),
            f"tenant {name}: it has a publisher, so it is a shared pool that no caller is: take {key} out",
        )
    for tier, share in tenant.shares:
        need(
            not share.max_bytes,
            f"tenant {name}: blocks of a shared pool count against the {tier}_max of its publisher: set it there",
        )
    for user in (tenant.publisher, *tenant.readers):
        known = by_name.get(user)
        need(known is not None, f"tenant {name}: there is no tenant {user!r}: list it under [[tenant]]")
        need(known is None or not known.is_pool, f"tenant {name}: {user} is a shared pool itself")
    need(
        tenant.publisher not in tenant.readers,
        f"tenant {name}: {tenant.publisher} is both publisher and reader: a publisher reads too, name it once",
    )


def _texts(entry: Mapping[str, Any], key: str, example: str) -> tuple[str, ...]:
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        raise TypeError(f"{key} must be a list of texts such as {example}, got {value!r}")
    if len(set(value)) < len(value):
        raise TypeError(f"{key} names {next(each for each in value if value.count(each) > 1)!r} twice")
    return tuple(value)


def recognised_by(tenant: TenantSection, socket_dir: Path, *, has_token: bool) -> list[str]:
    """Return, for people, each way in which a caller is recognised as `tenant`. `has_token` says whether the tokens
    file names it."""
    if tenant.is_pool:
        readers = ", ".join(tenant.readers) or "nobody else"
        return [f"shared pool: {tenant.publisher} puts, {readers} reads"]
    ways = [f"socket {socket_dir / TENANTS / tenant.name}"] if tenant.socket else []
    ways += [f"cgroup {path}" for path in tenant.cgroups]
    ways += [f"uid {uid}" for uid in tenant.uids] + [f"gid {gid}" for gid in tenant.gids]
    ways += ["any unmapped user"] if tenant.unmapped else []
    return [*ways, *(f"certificate {name}" for name in tenant.certificates), *(["token"] if has_token else [])]
