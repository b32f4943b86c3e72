"""Reads a request's JSON: every field is checked where it is taken, and a field nobody took is an error.

Owns what "an integer from 1 to 64" means and how its absence is told. It never knows what a field is for.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

from kvstore_engine.server.api_errors import ApiError, invalid

_MOST_SHOWN = 40  # characters


def parse(raw: bytes) -> dict[str, Any]:
    """The object in `raw`. ApiError 400 for anything else."""
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise invalid("the body is not valid JSON") from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object")
    return value


class Body:
    """One object's fields. `null` counts as absent, as in OpenAI's API."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}

    def take(self, name: str) -> Any:
        """The field as it is; None if absent."""
        return self._fields.pop(name, None)

    def text(self, name: str) -> str | None:
        value = self.take(name)
        if value is not None and not isinstance(value, str):
            raise invalid(f"{name} must be a string, got {_kind(value)}", name)
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is not None and not isinstance(value, bool):
            raise invalid(f"{name} must be true or false, got {_kind(value)}", name)
        return bool(value)

    def integer(self, name: str, least: int, most: int) -> int | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid(f"{name} must be an integer, got {_kind(value)}", name)
        if not least <= value <= most:
            raise invalid(f"{name} must be {least} to {most}, got {_shown(value)}", name)
        return value

    def number(self, name: str, least: float, most: float, default: float) -> float:
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise invalid(f"{name} must be a number, got {_kind(value)}", name)
        if not least <= value <= most:  # nor is NaN
            raise invalid(f"{name} must be {least:g} to {most:g}, got {_shown(value)}", name)
        return float(value)

    def strings(self, name: str, most: int) -> tuple[str, ...]:
        """One string or a list of them."""
        value = self.take(name)
        if value is None:
            return ()
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise invalid(f"{name} must be a string or a list of strings", name)
        if len(listed) > most:
            raise invalid(f"{name} takes at most {most} strings, got {len(listed)}", name)
        return tuple(listed)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise invalid(f"{name} must be an object, got {_kind(value)}", name)
        return value or {}

    def refuse(self, name: str, neutral: Collection[object], why: str) -> None:
        """A field that this server does not have: accepted only with a value that changes nothing."""
        value = self.take(name)
        if value is not None and value not in neutral:
            raise invalid(f"{name} is not supported: {why}", name, code="unsupported_parameter")

    def ignore(self, *names: str) -> None:
        """Fields that change no answer."""
        for name in names:
            self.take(name)

    def require(self, name: str) -> Any:
        """As `take`, of a field that has to be there; a misspelt one is named."""
        if name not in self._fields:
            near = get_close_matches(name, self._fields, 1)
            raise invalid(f"{name} is missing" + (f"; is {near[0]!r} meant for it?" if near else ""), name)
        return self.take(name)

    def end(self) -> None:
        """ApiError if a field is left: a misspelt one must not be silently without effect."""
        if self._fields:
            name = min(self._fields)
            raise invalid(f"unknown field {name!r}", name, code="unknown_parameter")


def _shown(number: float) -> str:
    """A number from a request: it may have thousands of digits."""
    text = str(number)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "something else")


__all__ = ["ApiError", "Body", "parse"]
