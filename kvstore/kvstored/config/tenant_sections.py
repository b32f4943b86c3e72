"""The `[[tenant]]` tables: from TOML to one `TenantSection` each, checked."""

from __future__ import annotations

import re
from typing import Any

from kvstore_console.units import parse_size
from kvstored.config.mistakes import ConfigError, did_you_mean
from kvstored.config.schema import Config, TenantSection

_TENANT_KEYS = {
    "name", "uids", "gids", "host_max", "nvme_max", "host_min", "durability", "put_in_place", "remote", "unmapped",
}  # fmt: skip
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_UID_TENANT = re.compile(r"uid-\d+\Z")  # what tenants.default = "by-uid" calls users that no tenant lists


def tenant_sections(raw: Any, config: Config) -> tuple[TenantSection, ...]:
    """Percentages are of the tiers' capacities in `config`. Raises ConfigError."""
    if not isinstance(raw, list):
        raise ConfigError("tenant: write each one as [[tenant]]")
    found: dict[str, TenantSection] = {}
    owners: dict[str, str] = {}  # "uids 1001" -> the tenant that lists it
    for entry in raw:
        if not isinstance(entry, dict):
            raise ConfigError("tenant: write each one as [[tenant]]")
        unknown = set(entry) - _TENANT_KEYS
        if unknown:
            key = sorted(unknown)[0]
            raise ConfigError(f"unknown key tenant.{key}{did_you_mean(key, _TENANT_KEYS)}")
        name = entry.get("name", "")
        if not isinstance(name, str) or not _TENANT_NAME.match(name):
            raise ConfigError(f"tenant.name {name!r}: 1 to 64 letters, digits, '_', '.', '-'")
        if name in found:
            raise ConfigError(f"tenant {name!r} is listed twice")
        if _UID_TENANT.match(name):
            raise ConfigError(f"tenant.name {name!r} is kept for a user that no tenant lists; choose another name")
        ids = {key: _ids(name, key, entry.get(key, [])) for key in ("uids", "gids")}
        for member in (f"{key} {number}" for key in ids for number in ids[key]):
            if owners.setdefault(member, name) != name:
                raise ConfigError(f"tenant {name}: {member} is listed by tenant {owners[member]} already")
        try:
            found[name] = TenantSection(
                name,
                ids["uids"],
                ids["gids"],
                parse_size(entry.get("host_max", 0), config.host.capacity_bytes),
                parse_size(entry.get("nvme_max", 0), config.nvme.capacity_bytes),
                parse_size(entry.get("host_min", 0), config.host.capacity_bytes),
                entry.get("durability", ""),
                _flag(entry, "put_in_place"),
                entry.get("remote", ""),
                bool(_flag(entry, "unmapped")),
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tenant {name}: {error}") from None
        if found[name].unmapped and owners.setdefault("unmapped", name) != name:
            raise ConfigError(f"tenant {name}: unmapped users are tenant {owners['unmapped']} already")
    return tuple(found.values())


def _flag(entry: dict[str, Any], key: str) -> bool | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r}")
    return value


def _ids(tenant: str, key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ConfigError(f"tenant {tenant}: {key} must be a list of numeric ids such as [1001], got {value!r}")
    return tuple(value)
