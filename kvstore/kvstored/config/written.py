"""Which settings were written where: what `kvctl config` shows beside what is in force."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvstored.config.schema import Written

DEFAULT_ORIGIN = "default"
LISTS = ("tier", "tenant")  # sections of which there are any number: [[tier]], [[tenant]]
Table = dict[str, Any]


def names_in(table: Table) -> Iterator[tuple[str, str]]:
    """(section, key) of each setting in a table; (name, "") for all entries of a list."""
    for section, keys in table.items():
        yield from ((section, key) for key in (keys if isinstance(keys, dict) else ("",)))


def written(merged: Table, origins: Mapping[tuple[str, str], str]) -> Iterator[Written]:
    """Every setting, with the origin of those that are not defaults. `merged` must have been checked."""
    for section, keys in merged.items():
        if section not in LISTS:
            for key, value in keys.items():
                yield Written(section, key, value, origins.get((section, key), DEFAULT_ORIGIN))
    for section in LISTS:
        for entry in merged[section]:
            for key, value in entry.items():
                yield Written(section, key, value, origins[(section, "")], entry["name"])
