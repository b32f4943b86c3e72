"""The TOML documents with settings, laid one over the other by section. Each tier is a section of its name.

Unknown names and values of a wrong type are errors here; the meaning of values is checked elsewhere.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvstore_console.units import is_size_text
from kvstored.config.mistakes import ConfigError, did_you_mean, need
from kvstored.config.schema import ConfiguredSetting
from kvstored.config.tiers import KINDS
from kvstored.config.tiers.base import AUTO

Table = dict[str, Any]
TENANT = "tenant"  # the section of which there are any number, apart from tiers: [[tenant]]
TIER, NEW_KIND = "tier", "memory"  # [[tier]], and what one is that does not say
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,15}\Z")
_TAKEN = (TIER, TENANT, "absent", "remote", "gpu")  # a kind may be the name of a tier of that kind
DEFAULT_ORIGIN = "default"
_NO_TEXT = re.compile("[\0\ud800-\udfff]")  # gRPC, LMDB and the kernel take no path with one of these
_LEAST, _MOST = 1e-6, 10**9  # of any number that is no size: clocks count nanoseconds in 64 bits, gRPC in 32


def reference_text() -> str:
    return Path(__file__).with_name("reference.toml").read_text()


@cache
def read_reference() -> Table:
    """Return the tables of reference.toml, which has every setting with its default. Each tier is a table under the
    tier's name. It is read once; callers change copies."""
    return dict(_named(tomllib.loads(reference_text()), {}, "reference.toml")) | {TENANT: []}


def read_file(path: Path, merged: Table) -> Table:
    """Return the tables of settings in the TOML file `path`. `merged` has the tiers that are defined already. Raises
    ConfigError."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no TOML, no UTF-8; thousands of digits, or of brackets
        raise ConfigError(f"{path} is not TOML: {error}") from None
    return _named(document, merged, str(path))


def read_override(text: str, merged: Table) -> Table:
    """Return a table with the one setting in `text`, which has the form section.key=value or tier.NAME.key=value.
    `merged` has the tiers that are defined already; another NAME adds a tier. Raises ConfigError."""
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    tier, of_tier, tier_key = key.partition(".")
    if not (equals and dot) or (section == TIER) != bool(of_tier):
        raise ConfigError(
            f"--set {text}: write section.key=value, for instance host.capacity=4GiB, or tier.NAME.key=value"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except (ValueError, RecursionError):
        parsed = value.strip()
    document = {TIER: [{"name": tier, tier_key: parsed}]} if of_tier else {section: {key: parsed}}
    return _named(document, merged, f"--set {text}")


def _named(document: Table, merged: Table, source: str) -> Table:
    """Return the document with each `[[tier]]` as a section of its name, in its place; a section [NAME] adds to it."""
    sections: Table = {}
    for section, keys in document.items():
        for name, table in _entries(keys, merged, source) if section == TIER else [(section, keys)]:
            if name == TENANT:
                sections[name] = table
                continue
            need(isinstance(table, dict), f"{source}: {name} is a section: write [{name}] and its keys below it")
            former = sections.get(name, {})
            for key in former.keys() & table.keys():
                raise ConfigError(
                    f'{source}: {name}.{key} is given twice, in [{name}] and in the [[tier]] with name = "{name}"'
                )
            sections[name] = former | table
    for name in (entry["name"] for entry in document.get(TIER, ()) if entry["name"] not in merged):
        sections[name] = {"kind": NEW_KIND} | sections[name]
    return sections


def _entries(entries: Any, merged: Table, source: str) -> Iterator[tuple[str, Table]]:
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ConfigError(f"{source}: tier: write each one as [[tier]]")
    names = [entry.get("name") for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        if not isinstance(name, str) or not _NAME.match(name):
            raise ConfigError(
                f"{source}: tier.name {name!r}: 1 to 16 lower-case letters, digits, '_', '-', a letter first"
            )
        need(names.count(name) == 1, f"{source}: tier {name!r} is listed twice")
        known = merged.get(name, entry)
        is_taken = (name in _TAKEN and name != known.get("kind")) or (name in merged and "kind" not in known)
        need(not is_taken, f"{source}: tier.name {name!r} is taken")
        yield name, {key: value for key, value in entry.items() if key != "name"}


def lay_over(merged: Table, sections: Table, reference: Table, source: str) -> None:
    """Replace settings in `merged` by those in `sections`, in place. Each value must have the type of its default in
    `reference`. Raises ConfigError, which names `source` (a file or an option) as the origin."""
    for section, table in sections.items():
        if section == TENANT:
            merged[section] = table
            continue
        if section not in merged:
            merged[section] = _new_tier(section, table, merged, source)
        known = merged[section]
        defaults = reference.get(section) or KINDS[known["kind"]].DEFAULTS
        for key, value in table.items():
            if key not in known:
                raise ConfigError(f"{source}: unknown key {section}.{key}{did_you_mean(key, known)}")
            _check_type(f"{source}: {section}.{key}", defaults[key], value)
            need(key != "kind" or value == known[key], f"{source}: {section}.kind is {known[key]!r} and stays that")
            known[key] = value


def tiers_in(merged: Table) -> dict[str, Table]:
    """Return those sections of `merged` that are tiers, fastest first. Tiers of one kind stay in the order of
    the file.
    """
    tiers = {name: table for name, table in merged.items() if isinstance(table, dict) and "kind" in table}
    order = [*KINDS]

    def place(item: tuple[str, Table]) -> tuple[bool, int]:
        kind = item[1]["kind"]
        return not KINDS[kind].is_before_host(item[1]), order.index(kind)

    return dict(sorted(tiers.items(), key=place))


def in_order(merged: Table) -> Table:
    """Return the sections of `merged` in the order of reference.toml; all tiers are where reference.toml has its
    tiers."""
    tiers = tiers_in(merged)
    first, *others = (name for name in merged if name not in tiers)
    return {first: merged[first]} | tiers | {name: merged[name] for name in others}


def _new_tier(name: str, table: Table, merged: Table, source: str) -> Table:
    """Return the defaults of a tier that is not listed yet."""
    if "kind" not in table:
        hint = '; a new tier says its kind: kind = "memory"' if "capacity" in table else ""
        raise ConfigError(f"{source}: unknown section [{name}]{did_you_mean(name, merged)}{hint}")
    kind = table["kind"]
    if not isinstance(kind, str) or kind not in KINDS:
        raise ConfigError(f"{source}: {name}.kind {kind!r} is unknown; known: {', '.join(KINDS)}")
    is_taken = name in _TAKEN and name != kind
    need(_NAME.match(name) is not None and not is_taken, f"{source}: tier.name {name!r} is taken")
    there = [tier for tier, other in tiers_in(merged).items() if other["kind"] == kind]
    if len(there) >= KINDS[kind].MOST:
        raise ConfigError(
            f"{source}: tier {name}: of kind {kind} there may be {KINDS[kind].MOST}, and there is: {', '.join(there)}"
        )
    return dict(KINDS[kind].DEFAULTS)


def _check_type(name: str, default: Any, value: Any) -> None:
    wanted = type(default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    fits = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    is_size = wanted is str and (default == AUTO or is_size_text(default)) and is_number and isinstance(value, int)
    is_fraction = wanted is int and name.endswith(("_s", "_worth")) and isinstance(value, float)
    is_whole = wanted is float and is_number
    if not (fits or is_size or is_fraction or is_whole):
        raise ConfigError(f"{name} must be {wanted.__name__}, got {value!r}")
    if is_number and not is_size:
        is_usable = not math.isfinite(value) or value == 0 or _LEAST <= abs(value) <= _MOST
        need(is_usable, f"{name} must be 0, or from {_LEAST} to {_MOST}, got {value}")
    is_text = not isinstance(value, str) or _NO_TEXT.search(value) is None
    need(is_text, f"{name}: {value!r} has a zero byte in it, or bytes that are no UTF-8")


def names_in(sections: Table) -> Iterator[tuple[str, str]]:
    """Yield a pair (section, key) for each setting in `sections`. The pair ("tenant", "") stands for all tenants."""
    for section, keys in sections.items():
        yield from ((section, key) for key in (keys if isinstance(keys, dict) else ("",)))


def configured_settings(merged: Table, origins: Mapping[tuple[str, str], str]) -> Iterator[ConfiguredSetting]:
    """Yield every setting in `merged`, which must have been checked, with its origin. `origins` has the file or option
    of each setting that is not a default."""
    for section, keys in merged.items():
        if section != TENANT:
            for key, value in keys.items():
                yield ConfiguredSetting(section, key, value, origins.get((section, key), DEFAULT_ORIGIN))
    for entry in merged[TENANT]:
        for key, value in entry.items():
            yield ConfiguredSetting(TENANT, key, value, origins[TENANT, ""], entry["name"])
