"""Typed access to a model's hyperparameters in GGUF metadata.

The module owns the rule that a missing or ill-typed value is an `UnsupportedModel` that names its key. It knows no
architecture.
"""

import math
from collections.abc import Mapping

from kvstore_engine.errors import UsageError


class UnsupportedModel(UsageError):
    """An error: a valid GGUF file has a model that this engine cannot run. The message names what is unsupported."""


class Hyperparameters:
    """A reader of a GGUF file's metadata that describes the model's architecture. Keys are given without the name of
    the architecture with which they begin in the file.
    """

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self.architecture = str(metadata.get("general.architecture", ""))

    def get(self, key: str) -> object:
        """Return the value of `key` as it is stored; None if the file does not have it."""
        return self._metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """Return the value of `key`, or `default` if it is missing, as a positive integer. Raises UnsupportedModel for
        anything else.
        """
        value = self._or(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise UnsupportedModel(f"metadata {self.architecture}.{key} must be a positive integer, is {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return the value of `key`, or `default` if it is missing, as a finite number. Raises UnsupportedModel for
        anything else.
        """
        value = self._or(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise UnsupportedModel(f"metadata {self.architecture}.{key} must be a number, is {value!r}")
        return float(value)

    def _or(self, key: str, default: object) -> object:
        value = self.get(key)
        return default if value is None else value
