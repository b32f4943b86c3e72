"""The error of a configuration that cannot be used, and the checks that raise it."""

from __future__ import annotations

from collections.abc import Collection, Iterable


class ConfigError(Exception):
    """An error: the configuration cannot be used. The message names the key, the mistake and a right value."""


def need(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


def need_within(name: str, value: float, least: float, most: float) -> None:
    """Check that `value` of the setting `name` is from `least` to `most`. Raises ConfigError."""
    need(least <= value <= most, f"{name} must be from {least} to {most}, got {value}")


def one_of(name: str, value: str, known: Collection[str]) -> None:
    need(value in known, f"{name}: {value!r} is unknown; known: {', '.join(known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    import difflib  # only for a mistake

    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(names)}"
