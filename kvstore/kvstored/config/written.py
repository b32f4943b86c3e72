"""The origin of each setting: what `kvctl config` shows beside what is in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstored.config.schema import WrittenSetting

DEFAULT_ORIGIN = "default"
TENANT = "tenant"  # the section of which there are any number, apart from tiers: [[tenant]]
Table = dict[str, Any]


def names_in(sections: Table) -> Iterator[tuple[str, str]]:
    """(section, key) of each setting; (TENANT, "") for all tenants."""
    for section, keys in sections.items():
        yield from ((section, key) for key in (keys if isinstance(keys, dict) else ("",)))


def written(merged: Table, origins: Mapping[tuple[str, str], str]) -> Iterator[WrittenSetting]:
    """Every setting, with the origin of those that are not defaults. `merged` must have been checked."""
    for section, keys in merged.items():
        if section != TENANT:
            for key, value in keys.items():
                yield WrittenSetting(section, key, value, origins.get((section, key), DEFAULT_ORIGIN))
    for entry in merged[TENANT]:
        for key, value in entry.items():
            yield WrittenSetting(TENANT, key, value, origins[TENANT, ""], entry["name"])
