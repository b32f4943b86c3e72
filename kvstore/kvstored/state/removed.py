"""The names of blocks that were removed by order, until nothing that was saved before can bring them back.

What policies and the predictor learned is saved now and then, and names blocks. A process that was killed after a
deletion leaves tables from before it. So the names go to the environment at once, in a transaction of their own, and
the next process forgets them again after it has read the tables. The names are removed with everything else that names
these blocks, by the next rewrite. They are few: above `LIMIT` the saved tables are given up instead. The module does
not decide when a rewrite is due.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from hashlib import blake2b

from kvstore_proto.identity import KEY_BYTES
from kvstored.state.process import StateProcess
from kvstored.store.blocks import Residency

LIMIT = 1 << 14  # keys, since the last rewrite and before the saved tables are read
_STEP_KEYS = 256
_TENANT_BYTES = 8
Entry = tuple[bytes, bytes]
Keys = Sequence[bytes] | None  # None: all of the tenant


class RemovedNames:
    """A record of the blocks that were removed by order, kept until no saved state names them. The event `noted` is set
    when there is something to save. `is_too_much` is true when more than `LIMIT` keys were removed before the saved
    tables were read, so that none of these tables may be used."""

    def __init__(self, residency: Residency, forgets: list[Callable[[int, Keys], None]]) -> None:
        """`forgets` are called with a tenant's number and keys at each removal by order."""
        self.noted = asyncio.Event()
        self.is_too_much = False
        self._residency = residency
        self._early: list[tuple[int, Keys]] | None = []  # until `again`
        self._early_keys = 0
        self._unsaved: list[tuple[int, int, Keys]] = []  # each after the number of the deletion
        self._keys = 0  # since the last rewrite
        self._gives_up = False  # the saved tables
        self._is_repeating = False
        forgets.append(self._note)

    def _note(self, tenant: int, keys: Keys) -> None:
        if self._is_repeating:
            return
        count = 1 if keys is None else len(keys)
        self._note_early(tenant, keys, count)
        self._keys += count
        self._unsaved.append((self._residency.deletions, tenant, keys))
        if self._keys > LIMIT:
            self._gives_up, self._keys = True, 0
            self._unsaved.clear()
        self.noted.set()

    def _note_early(self, tenant: int, keys: Keys, count: int) -> None:
        if self._early is not None and not self.is_too_much:
            self._early.append((tenant, keys))
            self._early_keys += count
            if self._early_keys > LIMIT:
                self.is_too_much = True
                self._early.clear()

    async def save(self, process: StateProcess) -> None:
        """Save the names of removed blocks that are not saved yet. Raises OSError, and then they are still noted as
        unsaved."""
        gives_up = False
        try:
            async with process.transaction(is_urgent=True) as change:
                unsaved = list(self._unsaved)  # now: a rewrite may have ended meanwhile
                gives_up, self._gives_up = self._gives_up, False
                if gives_up:
                    await change.keep_only("learned", [])
                    await change.keep_only("removed", [])
                await change.put("removed", self._entries(unsaved))
        except BaseException:
            self._gives_up |= gives_up
            raise
        last = unsaved[-1][0] if unsaved else 0
        self._unsaved = [each for each in self._unsaved if each[0] > last]

    def rewritten(self, deletions: int) -> None:
        """Note that the state file no longer names the blocks of the first `deletions` deletions."""
        self._unsaved = [each for each in self._unsaved if each[0] > deletions]
        self._keys = sum(1 if keys is None else len(keys) for _, _, keys in self._unsaved)
        self._gives_up = False

    def read(self, entries: Iterable[Entry], tenants: Iterable[str]) -> None:
        """Take over the `entries` (removed blocks) that a killed process saved. `tenants` are the tenants that saved
        tables may name."""
        names = {_digest(name): name for name in tenants}
        for key, _ in entries:
            name, block = names.get(key[:_TENANT_BYTES]), key[_TENANT_BYTES:]
            if name is not None and len(block) in (0, KEY_BYTES):
                self._note_early(self._residency.tenant(name), (block,) if block else None, 1)

    def again(self) -> Generator[None, None, None]:
        """Remove the names of all removed blocks once more from everything that was learned, since a saved table may
        have brought them back. The generator yields after each step."""
        early, self._early = self._early or [], None
        keys_of: dict[int, list[bytes]] = {}
        for tenant, keys in early:
            if keys is None:
                self._repeat(tenant, None)
                yield
            else:
                keys_of.setdefault(tenant, []).extend(keys)
        for tenant, theirs in keys_of.items():
            for first in range(0, len(theirs), _STEP_KEYS):
                self._repeat(tenant, theirs[first : first + _STEP_KEYS])
                yield

    def _repeat(self, tenant: int, keys: Keys) -> None:
        self._is_repeating = True
        self._residency.forget(tenant, keys)
        self._is_repeating = False

    def _entries(self, names: Iterable[tuple[int, int, Keys]]) -> list[Entry]:
        digests = [_digest(tenant.name) for tenant in self._residency.tenants]
        return [(digests[tenant] + key, b"") for _, tenant, keys in names for key in (keys or (b"",))]


def _digest(tenant: str) -> bytes:
    return blake2b(tenant.encode(), digest_size=_TENANT_BYTES).digest()
