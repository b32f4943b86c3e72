"""The parts that connectors share: loading their classes, and their sessions with the daemon.

A connector's package imports its classes on first use. If the engine is not installed, one sentence says so; the
package's other modules can be imported and tested without the engine.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from kvstore_client.entry import connect
from kvstore_client.items import ITEM_STAGING_BYTES, ItemStore
from kvstore_client.session import Session
from kvstore_proto.errors import KVStoreError
from kvstore_proto.fingerprint import Fingerprint

log = logging.getLogger(__name__)


def engine_class(package: str, files: Mapping[str, str], name: str, *, engine: str, install: str) -> Any:
    """Import and return the class `name` of the connector package `package`, on its first use. `files` maps each class
    to the package's module that defines it. Raises AttributeError for a name that is not in `files`. Raises ImportError
    if torch or the engine is missing; its message says what to `install`. `engine` is the engine's name as users write
    it; the engine's module has that name in lower case.
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
    """Connect to the daemon whose directory is `socket` ("" for the default), with the `options` of
    `kvstore_client.connect`, and return the session. It is degraded while there is no daemon.

    Return None if the daemon refuses this engine for good. Both cases are logged to `logger`.
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


class CurrentItems:
    """The store of the items of a model that may change: its session is opened for a fingerprint, and anew for another
    one. `socket` is the daemon's directory, "" the default. Connecting, and a lookup, take at most `deadline_s`
    seconds.
    """

    def __init__(self, socket: str, client_name: str, deadline_s: float) -> None:
        self._socket, self._client_name, self._deadline_s = socket, client_name, deadline_s
        self._opened: tuple[Fingerprint, Session | None] | None = None

    def store(self, fingerprint: Fingerprint) -> ItemStore | None:
        """Return the store of the items of `fingerprint`, or None if the daemon refuses this process."""
        if self._opened is None or self._opened[0] != fingerprint:
            self.close()
            session = engine_session(
                log, self._socket, fingerprint=fingerprint, client_name=self._client_name,
                connect_timeout_s=self._deadline_s, staging_bytes=ITEM_STAGING_BYTES,
            )  # fmt: skip
            self._opened = fingerprint, session
        session = self._opened[1]
        return None if session is None else ItemStore(session, deadline_s=self._deadline_s)

    def close(self) -> None:
        """End the session with the daemon. A later call opens one anew."""
        opened, self._opened = self._opened, None
        if opened is not None and opened[1] is not None:
            opened[1].close()


class SayOnce:
    """A callable that passes a sentence to `say` the first time, and drops it when it comes again. It is safe for
    several threads.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._said = say, set[str]()

    def __call__(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._say(sentence)
