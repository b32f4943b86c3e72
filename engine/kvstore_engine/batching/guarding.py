"""Keeps an observer's mistakes away from the engine: a full disk under a trace must not cost anybody's answer.

Owns what happens when an observer raises although it must not: it is told nothing more, and the log says so once.
"""

import logging
from collections.abc import Callable

from kvstore_engine.batching.observer import Observer

_log = logging.getLogger(__name__)
_TOLD = tuple(name for name, member in vars(Observer).items() if callable(member) and not name.startswith("_"))


def guarded(observer: Observer) -> Observer:
    """Tells `observer` all that it is told, until `observer` raises."""
    guard = Observer()

    def forwarding(tell: Callable[..., None]) -> Callable[..., None]:
        def told(*event: object, **more: object) -> None:
            try:
                tell(*event, **more)
            except Exception:
                _log.exception("the observer %s raised: it is told nothing more", type(observer).__name__)
                vars(guard).clear()  # what is left is the class's own, which does nothing

        return told

    for name in _TOLD:
        setattr(guard, name, forwarding(getattr(observer, name)))
    return guard
