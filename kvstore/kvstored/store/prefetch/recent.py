"""The blocks of the requests of the last minutes: the requested ones, and the ones put.

An engine's request is a get, perhaps two (of mapped blocks, then of the rest), and puts of its computed blocks. Bounded
by tenant: the oldest are forgotten. An entry that names a deleted block is not used from then on, and is gone some
ticks later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvstore_predictor.base import Array
from kvstored.clock import NS_PER_S

SAME_GET_NS = NS_PER_S  # two gets of one session of the same chain within this are one request
PUT_AFTER_GET_NS = 600 * NS_PER_S  # what an answer takes to be computed and stored, at most
PUT_AFTER_PUT_NS = 10 * NS_PER_S  # between the puts of one request
MARKS_MAX = 16_384  # of one tenant
TIDIED = 512  # entries a tick: 0.3 ms
LOOKED_BACK = 64  # blocks of a chain, from its end, at which a request may have ended
COPIED = 512  # entries of a piece
ENDS_MAX = 1 << 16  # of all tenants, over a restart
END = np.dtype([("tenant", "i8"), ("end", "V16"), ("deepest", "V16")])
_NO_MARK = (b"", 0)
_DONE = object()
Key = TypeVar("Key")
Value = TypeVar("Value")


@dataclass(slots=True)
class _Tenant:
    """The requests of a tenant. `marks`: by a key at which a put of a request may begin or end, the last key of the
    request, and until when. `names`: by the last key of a request, keys of its chain, the deepest first: the first
    one is the last that was put. `gets`: by session and last key, the time. `deleted`: blocks that these may still
    name.
    """

    marks: OrderedDict[bytes, tuple[bytes, int]] = field(default_factory=OrderedDict)
    names: OrderedDict[bytes, tuple[bytes, ...]] = field(default_factory=OrderedDict)
    gets: OrderedDict[tuple[int, bytes], int] = field(default_factory=OrderedDict)
    deleted: set[bytes] = field(default_factory=set)
    tidying: Iterator[None] | None = None


class RecentRequests:
    """The requests of all tenants. A call costs O(1)."""

    def __init__(self) -> None:
        self._tenants: dict[int, _Tenant] = {}

    def got(self, tenant: int, session: int, keys: Sequence[bytes], found: int, now_ns: int) -> bool:
        """A get of the chain `keys`, whose first `found` blocks were there. Whether it is a new request."""
        recent, last = self._of(tenant), keys[-1]
        recent.deleted.difference_update(keys)
        asked = (session, last)
        before_ns = recent.gets.get(asked)
        _keep(recent.gets, asked, now_ns)
        if before_ns is not None and now_ns - before_ns < SAME_GET_NS:
            return False
        mark = (last, now_ns + PUT_AFTER_GET_NS)
        _keep(recent.marks, last, mark)
        if found < len(keys):
            _keep(recent.marks, keys[found], mark)
        _keep(recent.names, last, _ladder(keys))
        return True

    def put(self, tenant: int, keys: Sequence[bytes], parent: bytes, now_ns: int) -> bool:
        """A put of blocks that continue `parent`. Whether it is a new request: no get or put of one led to it."""
        recent, last = self._of(tenant), keys[-1]
        recent.deleted.difference_update(keys)
        marks = (recent.marks.get(key, _NO_MARK) for key in (keys[0], parent, last))
        end = next((end for end, until_ns in marks if now_ns < until_ns and end not in recent.deleted), b"")
        if not end:
            _keep(recent.names, last, _ladder(keys))
        elif end != last and (names := recent.names.get(end)) is not None:
            recent.names[end] = (last, *names[1:])
        if recent.marks.get(last, _NO_MARK)[1] <= now_ns:
            _keep(recent.marks, last, (end or last, now_ns + PUT_AFTER_PUT_NS))
        return not end

    def end_of(self, tenant: int, keys: Sequence[bytes]) -> bytes:
        """The last key of the request that the chain `keys` is of, or the chain's own."""
        recent = self._of(tenant)
        ends = (recent.marks[key][0] for key in keys[: -LOOKED_BACK - 1 : -1] if key in recent.marks)
        return next((end for end in ends if end not in recent.deleted), keys[-1])

    def names(self, tenant: int, end: bytes) -> Sequence[bytes]:
        """Blocks of the request that ended with block `end`, the deepest first: its answer may be stored too, or its
        last blocks may not be."""
        recent = self._tenants.get(tenant)
        return (end,) if recent is None else recent.names.get(end, (end,))

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Name these blocks no more (None: any of the tenant's)."""
        if keys is None:
            self._tenants.pop(tenant, None)
        elif (recent := self._tenants.get(tenant)) is not None:
            for key in keys:
                recent.marks.pop(key, None)
                recent.names.pop(key, None)
            recent.deleted.update(keys)

    def ends(self) -> Iterator[Array]:
        """Of the latest requests of each tenant the last key and the deepest block (dtype END), in small pieces."""
        yield np.empty(0, END)
        most = ENDS_MAX // max(1, len(self._tenants))
        for tenant, recent in list(self._tenants.items()):
            ends = list(recent.names)[-most:] if most else []
            for first in range(0, len(ends), COPIED):
                part = ((end, recent.names.get(end)) for end in ends[first : first + COPIED])
                known = [(tenant, end, names[0]) for end, names in part if names]
                yield np.array([row for row in known if row[2] not in recent.deleted], END)

    def restore(self, ends: Array) -> None:
        """Go on from the joined pieces of `ends`."""
        for tenant, end, deepest in ends.tolist():
            _keep(self._of(tenant).names, end, (deepest, end))

    def tidy(self) -> None:
        """A slice of looking through what is kept for names of deleted blocks. To be called a few times a second."""
        for recent in self._tenants.values():
            if recent.deleted or recent.tidying is not None:
                recent.tidying = recent.tidying or _tidied(recent)
                if next(recent.tidying, _DONE) is _DONE:
                    recent.tidying = None

    def _of(self, tenant: int) -> _Tenant:
        recent = self._tenants.get(tenant)
        if recent is None:
            recent = self._tenants[tenant] = _Tenant()
        return recent


def _tidied(recent: _Tenant) -> Iterator[None]:
    """Goes once through all tables. Blocks that are deleted meanwhile are for the next time."""
    deleted, looked_for = recent.deleted, frozenset(recent.deleted)
    for at, end in enumerate(list(recent.names)):
        if at % TIDIED == TIDIED - 1:
            yield
        names = recent.names.get(end, ())
        if not deleted.isdisjoint(names):
            recent.names[end] = tuple(name for name in names if name not in deleted)
    for at, key in enumerate(list(recent.marks)):
        if at % TIDIED == TIDIED - 1:
            yield
        if recent.marks.get(key, _NO_MARK)[0] in deleted:
            del recent.marks[key]
    for at, asked in enumerate(list(recent.gets)):
        if at % TIDIED == TIDIED - 1:
            yield
        if asked[1] in deleted:
            recent.gets.pop(asked, None)
    deleted -= looked_for


def _ladder(keys: Sequence[bytes]) -> tuple[bytes, ...]:
    """The last key, twice, then those 1, 2, 4, … before it."""
    steps = (2**step for step in range(len(keys).bit_length()))
    return (keys[-1], keys[-1], *(keys[-1 - step] for step in steps if step < len(keys)))


def _keep(table: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """As the newest entry of a table that forgets its oldest."""
    table[key] = value
    table.move_to_end(key)
    if len(table) > MARKS_MAX:
        table.popitem(last=False)
