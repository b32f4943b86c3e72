"""The known sessions: for each the last chain, by its last two keys.

A request whose known prefix ends at the last block of a chain, or at the last but one (a last block is often partial),
continues that chain. A block that many different blocks follow (a system prompt) belongs to no session. Every request
takes the next slot of a ring, so the chain used longest ago is forgotten first.

The module owns slots, the names of chains, and *marks*: keys at depths 2, 4, 8, ..., which show how much a new chain
has in common with others (at least half of it is seen). It knows no hazards. Bounded: `slots` requests, twice as many
marks. Beyond `LOOKED_BACK` blocks, the time of a call does not grow with the length of a chain.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

SHARED_FAN = 4
LOOKED_BACK = 512  # blocks that a request may add to its session


class _Names:
    """The names of one tenant. `ends`: the key of a chain's last block gives its slot, the key of the block before it
    gives ~slot; each live chain is under both, unless another one has taken the name. `marks`: whether the block is
    shared by many sessions.
    """

    __slots__ = ("chains", "ends", "marks", "old_marks")

    def __init__(self) -> None:
        self.ends: dict[bytes, int] = {}
        self.marks: dict[bytes, bool] = {}
        self.old_marks: dict[bytes, bool] = {}
        self.chains = 0

    def is_shared(self, key: bytes) -> bool:
        return bool(self.marks.get(key) or self.old_marks.get(key))


class AwaitedReturns:
    """A table of the known sessions whose next request is awaited, with one session in each of `slots` slots. `live`:
    True while the next request is awaited. `tokens`: the tokens of the last prompt and answer, -1 if not known;
    `answer`: the tokens of that answer. `bin`: the number of the age bin up to which the time since the last request
    has been counted. `due_s`: the time when a request is announced to continue the session, 0 if none is.
    """

    def __init__(self, slots: int) -> None:
        self.slots = max(slots, 1)
        self.last: list[bytes | None] = [None] * self.slots
        self.above: list[bytes | None] = [None] * self.slots
        self.tenant, self.tokens, self.answer = (array("q", bytes(8 * self.slots)) for _ in range(3))
        self.length, self.turn, self.cell, self.bin = (array("i", bytes(4 * self.slots)) for _ in range(4))
        self.used_s, self.pace, self.due_s = (array("d", bytes(8 * self.slots)) for _ in range(3))
        self.live, self.fan = (bytearray(self.slots) for _ in range(2))
        self.hand = 0  # the slot that is taken next
        self._names: dict[int, _Names] = {}
        self._marks = 0

    def wanted(self, live: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the slots `live` unchanged, because ranks may be needed for all sessions."""
        return live

    def find(self, tenant: int, keys: Sequence[bytes]) -> tuple[int, int]:
        """Return the slot of the session that a request of `tenant` for the blocks `keys` continues, and how many
        leading `keys` belong to that session already. Return (-1, 0) if the request continues none.
        """
        names = self._names.get(tenant)
        if names is None:
            return -1, 0
        ends, backwards = names.ends, reversed(keys)
        for key in filter(ends.__contains__, backwards if len(keys) <= LOOKED_BACK else islice(backwards, LOOKED_BACK)):
            packed = ends[key]
            slot, known = (packed, self.length[packed]) if packed >= 0 else (~packed, self.length[~packed] - 1)
            if known <= 1 < len(keys):
                break
            if packed >= 0 or not names.is_shared(key):
                return slot, known
        return -1, 0

    def known(self, tenant: int, keys: Sequence[bytes]) -> int:
        """Return how many leading `keys` other requests of `tenant` had too, by the marks that are kept for some
        blocks. The result is at least half of the true number.
        """
        names, found, depth, blocks = self._names.get(tenant), 0, 2, len(keys)
        if names is None:
            return 0
        marks, old_marks = names.marks, names.old_marks
        while depth <= blocks and ((key := keys[depth - 1]) in marks or key in old_marks):
            found, depth = depth, 2 * depth
        return found

    def fan_of(self, slot: int, keys: Sequence[bytes]) -> int:
        """Return how many different blocks have followed the last block but one of `keys`, a request that continues the
        session in `slot`.
        """
        is_same = len(keys) > 1 and self.above[slot] == keys[-2] and self.last[slot] != keys[-1]
        return self.fan[slot] + 1 if is_same else 0

    def take(self, tenant: int, keys: Sequence[bytes], fan: int = 0, known: int = 0) -> int:
        """Take the next slot for a session that a request of `tenant` for the blocks `keys` begins or continues, and
        return the slot. The caller sets every column of the slot. `fan` is the result of `fan_of`. The first `known`
        keys have marks already, from the session that is continued.
        """
        slot = self.hand
        self.hand = slot + 1 if slot + 1 < self.slots else 0
        if self.live[slot]:
            self.drop(slot)
            self._drop_if_empty(self.tenant[slot])
        names = self._names.get(tenant)
        if names is None:
            names = self._names[tenant] = _Names()
        above = keys[-2] if len(keys) > 2 else None  # the first block is no session's
        if above is not None and fan >= SHARED_FAN:
            self._mark(names, above, True)
            above = None
        depth, blocks, marks, old_marks = 1 << (known.bit_length() or 1), len(keys), names.marks, names.old_marks
        while depth <= blocks:
            key = keys[depth - 1]
            if key not in marks:
                marks[key] = key in old_marks and old_marks[key]
                self._marks += 1
            depth *= 2
        if self._marks > self.slots:
            self._renew_marks()
        self._name(names, slot, tenant, keys[-1], above, fan)
        return slot

    def name(self, slot: int, tenant: int, last: bytes, above: bytes | None, fan: int) -> None:
        names = self._names.get(tenant)
        if names is None:
            names = self._names[tenant] = _Names()
        self._name(names, slot, tenant, last, above, fan)

    def _name(self, names: _Names, slot: int, tenant: int, last: bytes, above: bytes | None, fan: int) -> None:
        ends = names.ends
        other = ends.get(last)
        if other is not None:
            if other >= 0:
                self.drop(other)
            else:
                self.above[~other] = None
        ends[last] = slot
        if above is not None:
            other = ends.get(above)
            if other is None:
                ends[above] = ~slot
            elif other >= 0:  # an end says more
                above = None
            else:
                self.above[~other] = None
                ends[above] = ~slot
        self.last[slot], self.above[slot] = last, above
        self.tenant[slot], self.fan[slot], self.live[slot] = tenant, fan if fan < 255 else 255, 1
        names.chains += 1

    def drop(self, slot: int) -> None:
        """Forget the session in slot number `slot`."""
        names = self._names[self.tenant[slot]]
        last, above = self.last[slot], self.above[slot]
        if last is not None:
            del names.ends[last]
        if above is not None:
            del names.ends[above]
        self.last[slot] = self.above[slot] = None
        self.live[slot] = 0
        names.chains -= 1

    def _drop_if_empty(self, tenant: int) -> None:
        names = self._names[tenant]
        if not names.chains:
            self._marks -= len(names.marks)
            del self._names[tenant]

    def by_end(self, tenant: int, key: bytes) -> int:
        """Return the slot of the session of `tenant` whose chain ends with block `key`, or -1 if there is none."""
        names = self._names.get(tenant)
        return -1 if names is None else max(names.ends.get(key, -1), -1)

    def forget(self, tenant: int, keys: Iterable[bytes] | None) -> None:
        """Forget each session of `tenant` whose chain has one of the blocks `keys` as its last block or its last but
        one, or all of the tenant's sessions if `keys` is None.
        """
        names = self._names.get(tenant)
        if names is None:
            return
        for key in list(names.ends) if keys is None else keys:
            packed = names.ends.get(key)
            if packed is not None:
                self.drop(packed if packed >= 0 else ~packed)
            self._marks -= names.marks.pop(key, None) is not None
            names.old_marks.pop(key, None)
        self._drop_if_empty(tenant)

    def marks(self) -> Iterator[tuple[int, bytes, bool]]:
        """Yield the marks of blocks, by which later requests recognize shared blocks: for each the tenant, the key, and
        whether many sessions share the block. Changes made meanwhile may be included or not.
        """
        for tenant, names in list(self._names.items()):
            for marks in (names.old_marks, names.marks):
                for key in list(marks):
                    if key in marks and self._names.get(tenant) is names:
                        yield tenant, key, marks[key]

    def restore_marks(self, marks: Iterable[tuple[int, bytes, bool]]) -> None:
        for tenant, key, mark in marks:
            if tenant in self._names:
                self._mark(self._names[tenant], key, mark)

    def _mark(self, names: _Names, key: bytes, is_shared: bool) -> None:
        self._marks += key not in names.marks
        names.marks[key] = is_shared or names.is_shared(key)
        if self._marks > self.slots:
            self._renew_marks()

    def _renew_marks(self) -> None:
        self._marks = 0
        for each in self._names.values():
            each.old_marks, each.marks = each.marks, {}
