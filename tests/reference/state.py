"""The small state of a daemon, as tests read it from its file, also while the daemon writes."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvstored.state.environment import Environment, newest
from kvstored.state.tables import tables_in

Entry = tuple[bytes, bytes]


def entries(state_dir: Path, database: str) -> list[Entry]:
    """Return the whole entries of a database; none before there is an environment."""
    path = newest(state_dir)
    if path is None:
        return []
    environment = Environment(path, shared=True)
    try:
        return [(key, value) for key, value in environment.read(database) if value is not None]
    finally:
        environment.close()


def learned(state_dir: Path) -> dict[str, np.ndarray]:
    """Return the tables of what was learned."""
    return tables_in(entries(state_dir, "learned"))


def files_with(state_dir: Path, *needles: bytes) -> list[tuple[str, bytes]]:
    """Return which files of the state directory hold which of `needles`. The slabs alone, which have the blocks'
    slots, are not looked at."""
    found = []
    for path in sorted(state_dir.rglob("*")):
        if path.is_file() and path.suffix != ".slab":
            content = path.read_bytes()
            found += [(path.name, needle) for needle in needles if needle in content]
    return found
