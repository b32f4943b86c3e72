"""What a check found: how bad, what was seen, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result. `advice` of an OK is what could be better still."""

    name: str
    level: Level
    seen: str
    advice: str = ""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, seen: str, advice: str = "") -> Finding:
    return Finding(name, Level.OK, seen, advice)


def warn(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, Level.WARN, seen, advice)


def fail(name: str, seen: str, advice: str) -> Finding:
    return Finding(name, Level.FAIL, seen, advice)


def guarded(name: str, check: Check) -> Iterator[Finding]:
    """The findings of a check; one that the system does not let us make is a warning, not an end."""
    try:
        yield from check()
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        yield warn(name, f"could not be checked: {error.strerror or error}{where}", "run kvctl doctor as root")
