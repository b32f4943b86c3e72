"""What every connector has at the door between its engine and the store.

A package for one engine imports its classes when they are asked for, and where the engine is not installed one sentence
says so: the package's other modules are imported and tested without the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kvstore_client.entry import connect
from kvstore_client.session import Session
from kvstore_proto.errors import KVStoreError


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


def engine_session(logger: logging.Logger, socket: str, **options: Any) -> Session | None:
    """Connect with the `options` of `kvstore_client.connect`: a session that is degraded while there is no daemon.

    Return None when the daemon refuses this engine for good. Both are said to `logger`.
    """
    try:
        session = connect(socket or None, **options)
    except KVStoreError as error:
        logger.error("kvstored refuses this engine, which goes on without it: %s", error)
        return None
    if session.state != "connected":
        logger.warning(
            "kvstored does not answer, so nothing is restored or stored until it does: %s",
            session.statistics().last_error,
        )
    return session


class SayOnce:
    """Passes each sentence on to `say` the first time that it is said. For several threads."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, set[str]()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
