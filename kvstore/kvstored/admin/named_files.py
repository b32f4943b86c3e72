"""The files that settings name: a reload looks at what they hold, since their paths stay the same when they change."""

from __future__ import annotations

import hashlib
import time
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from kvstored.config import Config

NEVER_READ = frozenset({"daemon.record"})  # written


class Content(NamedTuple):
    """`digest` identifies what a file held; `seen` says to people when it was written."""

    path: Path
    digest: bytes
    seen: str


def contents_of(config: Config) -> dict[str, Content]:
    """Return what each file that a setting names holds now, by the setting's name."""
    named: dict[str, Any] = {section.name: getattr(config, section.name) for section in fields(Config)}
    sections = {name: value for name, value in named.items() if hasattr(value, "__dataclass_fields__")}
    sections |= {tier.name: tier for tier in config.listed}
    found = {}
    for section, value in sections.items():
        for field in fields(value):
            path, name = getattr(value, field.name), f"{section}.{field.name}"
            if isinstance(path, Path) and name not in NEVER_READ and not path.is_dir():
                found[name] = _content(path)
    return found


def _content(path: Path) -> Content:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError as error:
        return Content(path, b"", f"{path}: {error.strerror}")
    return Content(path, digest, f"{path} of {written}")
