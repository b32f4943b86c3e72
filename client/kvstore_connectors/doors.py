"""The door of a package for one engine: its classes are imported when they are asked for, and where the engine is not
installed one sentence says so. So the package's other modules are imported and tested without the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any


def engine_class(package: str, files: Mapping[str, str], name: str, *, engine: str, install: str) -> Any:
    """For `__getattr__` of `package`: the class `name`, of that one of its modules which `files` gives.

    Raises AttributeError for a name that is not in `files`, and ImportError, with what to `install`, where `engine` (as
    users spell it; its module is that in lower case) or torch is missing.
    """
    if name not in files:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{package}.{files[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in (engine.lower(), "torch"):
            raise
        raise ImportError(
            f"{name} runs inside {engine}, and {error.name} is not installed here: "
            f"{install} into the environment that runs it"
        ) from None
