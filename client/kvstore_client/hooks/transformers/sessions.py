"""Sessions for models: opened with the model's fingerprint, and closed once the waiting blocks are stored.

Owns the sessions shared by caches that were given a socket directory instead of a session: one for each directory and
model state, until the program ends.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import Any

from kvstore_client.entry import connect
from kvstore_client.hooks.transformers.fingerprint import BLOCK_TOKENS, model_fingerprint
from kvstore_client.hooks.transformers.storer import storer_of
from kvstore_client.paths import socket_directory
from kvstore_client.session import Session

CLOSE_TIMEOUT_S = 10.0


def kvstore_session(
    model: Any,
    socket: str | os.PathLike[str] | None = None,
    *,
    model_id: str | None = None,
    block_tokens: int = BLOCK_TOKENS,
    **options: Any,
) -> Session:
    """A session for the K/V state of `model`; `socket` and `options` are those of `kvstore_client.connect`.

    `model_id` and `block_tokens` are those of `model_fingerprint`. Raises KVStoreError(INVALID) for a model whose state
    cannot be stored. Close it when all is done, or use it as a context manager: closing waits for what is being stored.
    """
    fingerprint = model_fingerprint(model, model_id=model_id, block_tokens=block_tokens)
    session = connect(socket, fingerprint=fingerprint, **{"client_name": "transformers", **options})
    session.before_close(lambda: flush(session, CLOSE_TIMEOUT_S))
    return session


def flush(session: Session, timeout_s: float | None = None) -> bool:
    """Wait until what the caches of a session announced is stored or given up. False when that took longer."""
    return storer_of(session).flush(timeout_s)


_shared: dict[tuple[str, bytes], Session] = {}
_lock = threading.Lock()


def shared_session(socket: str | os.PathLike[str], model: Any) -> Session:
    """The session of this process with the daemon at `socket` for this model in its present state."""
    key = (str(socket_directory(socket)), model_fingerprint(model).digest())
    with _lock:
        if key not in _shared:
            _shared[key] = kvstore_session(model, socket)
        return _shared[key]


@atexit.register
def _close_shared() -> None:
    for session in _shared.values():
        session.close()
    _shared.clear()
