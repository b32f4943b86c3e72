"""Orders are what operators, trainers and owners of objects have said to the running daemon and that outlives it:
settings of tenants, versions of weights, and the catalogue of objects.

They are read before a client is served, and an operator's order is synced before its call is answered. If they cannot
be read at the start, the daemon serves without them and reads them later. The module does not know their meaning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstored.state.process import StateProcess

log = logging.getLogger(__name__)
TENANTS, WEIGHTS, OBJECTS = "tenants", "weights", "objects"  # databases
START_S = 10.0  # the longest that a start waits
Entry = tuple[bytes, bytes]


class Orders:
    """The entries of the databases above of the small state, in memory and through `process`. The saved entries are
    read once; orders that came before them remain."""

    def __init__(self, process: StateProcess) -> None:
        self._process = process
        self.entries: dict[str, dict[bytes, bytes]] = {TENANTS: {}, WEIGHTS: {}, OBJECTS: {}}
        self.is_read = False
        self._when_read: list[Callable[[], None]] = []

    async def read_before_serving(self) -> None:
        """Read the saved entries. If that fails or takes longer than `START_S` seconds, log it."""
        try:
            async with asyncio.timeout(START_S):
                await self.read()
        except (OSError, TimeoutError) as error:
            why = str(error) or f"it takes more than {START_S:g} s"
            log.warning("saved settings, versions of weights and objects cannot be read (%s): not in force yet", why)

    async def read(self) -> None:
        """Read the saved entries, unless that was done already. Raises OSError."""
        if self.is_read:
            return
        await self._process.open()
        saved = {name: dict(await self._process.read(name)) for name in self.entries}
        if not self.is_read:
            self.is_read = True
            for name, entries in saved.items():
                self.entries[name] = entries | self.entries[name]
            for function in self._when_read:
                function()

    def when_read(self, function: Callable[[], None]) -> None:
        """Call `function` once, when the saved entries are read."""
        self._when_read.append(function)

    async def save(self, name: str, key: bytes, value: bytes | None) -> None:
        """Save `value` for `key` in the database `name`, None: remove the entry; it survives a loss of power. The
        caller changes `entries` next. Raises KVStoreError, having changed nothing."""
        with self._explained():
            await self.read()
            async with self._process.transaction(durable=True) as change:
                if value is None:
                    await change.remove(name, [key])
                else:
                    await change.put(name, [(key, value)])

    async def remove(self, name: str, keys: Iterable[bytes]) -> None:
        """Remove the entries of the database `name` with the keys `keys`, all or none; that survives a loss of power.
        Raises KVStoreError, having changed nothing."""
        going = list(keys)
        with self._explained():
            await self.read()
            async with self._process.transaction(durable=True) as change:
                await change.remove(name, going)
        for key in going:
            self.entries[name].pop(key, None)

    async def forget(self, name: str, prefix: bytes) -> None:
        """Remove the entries of the database `name` whose keys begin with `prefix`, as `remove` does."""
        with self._explained():
            await self.read()
        if going := [key for key in self.entries[name] if key.startswith(prefix)]:
            await self.remove(name, going)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn an OSError into a KVStoreError that says what to do."""
        try:
            yield
        except OSError as error:
            what = f"{self._process.path} cannot be written ({error.strerror or error})"
            raise KVStoreError(ErrorKind.UNAVAILABLE, f"nothing was changed: {what}: make room there") from None

    def items(self, name: str) -> list[Entry]:
        """Return the entries of the database `name`, in order."""
        return sorted(self.entries[name].items())
