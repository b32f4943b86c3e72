"""Make the dataclass of a section from its table in a TOML document: each field has the key of its name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from kvstore_console.units import parse_size
from kvstored.config.mistakes import ConfigError

Table = dict[str, Any]
Section = TypeVar("Section")
NOTHING: Mapping[str, Any] = {}
_hints = cache(get_type_hints)


def section_of(kind: type[Section], name: str, table: Table, known: Mapping[str, Any] = NOTHING) -> Section:
    """Return a settings object of the class `kind`. Its fields have the values in `known`, and otherwise those in the
    TOML `table` of the section `name`. Sizes become bytes, and paths absolute; a path "" becomes None. Raises
    ConfigError."""
    hints = _hints(kind)  # type: ignore[arg-type]
    values = dict(known)
    for field in fields(kind):  # type: ignore[arg-type]
        key = field.name if field.name in table else field.name.removesuffix("_bytes")
        if field.name in values or key not in table:
            continue
        value = table[key]
        if "_bytes" in field.name:
            value = size(name, table, key)
        elif hints[field.name] is Path or hints[field.name] == Path | None:
            if not value and hints[field.name] is Path:
                raise ConfigError(f"{name}.{key} is empty: write a path")
            value = Path(value).absolute() if value else None
        values[field.name] = value
    return kind(**values)


def size(section: str, table: Table, key: str, whole_bytes: int = 0) -> int:
    """Return the size in bytes that `key` has in the TOML `table`; percentages are of `whole_bytes`. Raises
    ConfigError, which names `section`.
    """
    try:
        return parse_size(table[key], whole_bytes)
    except ValueError as error:
        raise ConfigError(f"{section}.{key}: {error}") from None
