"""Sessions for models: opened with the model's fingerprint, and closed once the waiting blocks are stored.

The module owns the sessions shared by caches that got a socket directory instead of a session: one for each directory
and model state, until the program ends. It also owns the copies of each session whose model is on a CUDA device.
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from kvstore_client.entry import connect
from kvstore_client.errors import invalid
from kvstore_client.paths import socket_directory
from kvstore_client.session import Session
from kvstore_connectors.transformers.copies import TensorCopies
from kvstore_connectors.transformers.fingerprint import device_index, inner_model, model_fingerprint
from kvstore_connectors.transformers.host_copies import HostTensorCopies
from kvstore_connectors.transformers.self_test import prove
from kvstore_connectors.transformers.storer import storer_of

if TYPE_CHECKING:
    from kvstore_connectors.transformers.device_copies import DeviceTensorCopies

CLOSE_TIMEOUT_S = 10.0


def kvstore_session(
    model: Any,
    socket: str | os.PathLike[str] | None = None,
    *,
    model_id: str | None = None,
    block_tokens: int | None = None,
    self_test: bool = True,
    **options: Any,
) -> Session:
    """Return a session for the K/V state of `model`; `socket` and `options` go to `kvstore_client.connect`.

    `model_id` and `block_tokens` go to `model_fingerprint`. For a model on a CUDA device the session is opened with
    that `device`. `self_test`: the model computes two short prompts first, once, to prove that it answers from restored
    blocks as without them. Raises KVStoreError(INVALID) for a model whose state cannot be stored, and for a device that
    cannot be used. Close the session at the end, or use it as a context manager: closing waits for blocks that are
    being stored.
    """
    inner = inner_model(model)
    prove(inner, block_tokens, skip=not self_test)
    fingerprint = model_fingerprint(model, model_id=model_id, block_tokens=block_tokens)
    device = device_index(inner)
    if device is not None:
        options = {**options, "device": device}
    session = connect(socket, fingerprint=fingerprint, **{"client_name": "transformers", **options})
    copies_of(session, inner)  # what it does before the session closes comes after the flush
    session.before_close(lambda: flush(session, CLOSE_TIMEOUT_S))
    return session


def flush(session: Session, timeout_s: float | None = None) -> bool:
    """Wait until every block that the caches of `session` announced is stored, or will not be stored. Return False if
    `timeout_s` seconds did not suffice; None waits without a limit.
    """
    return storer_of(session).flush(timeout_s)


_device_copies: WeakKeyDictionary[Session, DeviceTensorCopies] = WeakKeyDictionary()
_shared: dict[tuple[str, bytes, int | None], Session] = {}
_lock = threading.RLock()  # opening a shared session asks for its copies


def copies_of(session: Session, model: PreTrainedModel) -> TensorCopies:
    """Return the object that copies blocks of `session` into and out of the tensors of `model`. Raises
    KVStoreError(INVALID) for a model on a CUDA device that is not the session's.
    """
    index = device_index(model)
    if index is None:
        return HostTensorCopies(model.device)
    if session.device.index != index:
        raise invalid(f"the model is on {model.device}, and the session was opened with device={session.device.index}")
    from kvstore_connectors.transformers.device_copies import DeviceTensorCopies, TorchStream

    with _lock:
        found = _device_copies.get(session)
        if found is None:
            found = _device_copies[session] = DeviceTensorCopies(session.device, TorchStream(model.device))
            session.before_close(found.close)
        return found


def shared_session(socket: str | os.PathLike[str], model: Any) -> Session:
    """Return the session of this process with the daemon at `socket`, for the state of `model` as it is now. It is
    opened at the first call and closed at the end of the program.
    """
    prove(inner_model(model), None)  # before its fingerprint: what it computes for that need not be computed twice
    key = (str(socket_directory(socket)), model_fingerprint(model).digest(), device_index(inner_model(model)))
    with _lock:
        if key not in _shared:
            _shared[key] = kvstore_session(model, socket)
        return _shared[key]


@atexit.register
def _close_shared() -> None:
    for session in _shared.values():
        session.close()
    _shared.clear()
