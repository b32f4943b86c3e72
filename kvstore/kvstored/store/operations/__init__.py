"""The requests that a client can make of the store: put, get, lookup, hints and delete, on plain records.

There is no wire message, no socket and no session here: the daemon's streams and unary calls, the simulator and tests
call these.
"""

from __future__ import annotations

from kvstored.store.assembly import Store
from kvstored.store.operations.client import Client
from kvstored.store.operations.delete import Delete
from kvstored.store.operations.discovery import Discovery
from kvstored.store.operations.get import Gets
from kvstored.store.operations.lookup import Hints, LookUp
from kvstored.store.operations.put import Puts
from kvstored.telemetry import DeletionLog

__all__ = ["Client", "Operations"]


class Operations:
    """The request handlers of one store: `put`, `get`, `look_up`, `hints`, `delete`, and `discovery` (questions to
    remote tiers).
    """

    def __init__(self, store: Store, deletions: DeletionLog) -> None:
        self.put = Puts(store)
        self.discovery = Discovery(store)
        self.get = Gets(store, self.discovery)
        self.look_up = LookUp(store, self.discovery)
        self.hints = Hints(store)
        self.delete = Delete(store, deletions)
