"""Users and groups that the daemon's user namespace does not map.

To a process in a user namespace the kernel shows every user that the namespace does not map as one number, the overflow
uid (65534 as a rule); groups likewise. So in a namespace that does not map all users that number is no identity: not
even where it is mapped too, since both look the same.
"""

from __future__ import annotations

from pathlib import Path

_ALL_IDS = 2**32 - 1  # -1 is no id
_DEFAULT_OVERFLOW = 65534


def is_unmapped(kind: str, number: int, proc: Path = Path("/proc")) -> bool:
    """Return whether an id of `kind`, "uid" or "gid", may stand for any that this process's user namespace does not
    map. `proc` is where procfs is mounted; without it the answer is yes for the overflow id."""
    return number == _overflow(proc / f"sys/kernel/overflow{kind}") and not _maps_all(proc / f"self/{kind}_map")


def _overflow(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return _DEFAULT_OVERFLOW


def _maps_all(path: Path) -> bool:
    """Return whether the lines of a map, `inside outside length`, cover every id. They never overlap."""
    try:
        return sum(int(line.split()[2]) for line in path.read_text().splitlines()) >= _ALL_IDS
    except (OSError, ValueError, IndexError):
        return False
