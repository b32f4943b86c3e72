"""The requests of the last minutes: the blocks that were requested, and the blocks that were put.

An engine's request consists of one get, or two gets (of mapped blocks, then of the rest), and of puts of the blocks
that the engine computed. The number of entries is bounded for each tenant: the oldest entries are forgotten. An entry
that names a deleted block is not used any more, and is removed some ticks later.
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
PARTS_MAX = 1 << 16  # of one tenant's objects: a terabyte in the largest parts
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
    """The requests of a tenant. `marks` maps a key at which a put of a request may begin or end to the last key of the
    request and to the time until which the mark is valid. `names` maps the last key of a request to keys of its
    chain, the deepest first: the first key is the last one that was put. `gets` maps session and last key to the
    time of the get. `parts` maps the last key of a get of an object's parts, which are no chain, to all of its keys.
    `deleted` holds blocks that these tables may still name.
    """

    marks: OrderedDict[bytes, tuple[bytes, int]] = field(default_factory=OrderedDict)
    names: OrderedDict[bytes, tuple[bytes, ...]] = field(default_factory=OrderedDict)
    gets: OrderedDict[tuple[int, bytes], int] = field(default_factory=OrderedDict)
    parts: OrderedDict[bytes, tuple[bytes, ...]] = field(default_factory=OrderedDict)
    deleted: set[bytes] = field(default_factory=set)
    tidying: Iterator[None] | None = None


class RecentRequests:
    """A record of each tenant's requests of the last minutes. It says whether a get or put belongs to a new request.
    Each call takes constant time."""

    def __init__(self) -> None:
        self._tenants: dict[int, _Tenant] = {}

    def got(self, tenant: int, session: int, keys: Sequence[bytes], found: int, now_ns: int) -> bool:
        """Note a get of the chain `keys` by `session`, whose first `found` blocks were stored. Return True when it is a
        new request, False for a repeated get of the same chain."""
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

    def got_parts(self, tenant: int, keys: Sequence[bytes]) -> None:
        """Note that the blocks `keys` of a get are the parts of an object, none of which continues another."""
        parts = self._of(tenant).parts
        parts[keys[-1]] = tuple(keys)
        parts.move_to_end(keys[-1])
        while len(parts) > 1 and sum(map(len, parts.values())) > PARTS_MAX:
            parts.popitem(last=False)

    def parts(self, tenant: int, end: bytes) -> Sequence[bytes]:
        """Return the keys of all parts of the object whose last part is `end`; () if no such object is known."""
        recent = self._tenants.get(tenant)
        return () if recent is None else recent.parts.get(end, ())

    def put(self, tenant: int, keys: Sequence[bytes], parent: bytes, now_ns: int) -> bool:
        """Note a put of the blocks `keys`, which continue the block `parent`. Return True when it is a new request,
        False when it belongs to an earlier get or put.
        """
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
        """Return the last key of the request that the chain `keys` belongs to, or the last of `keys` when no such
        request is known.
        """
        recent = self._of(tenant)
        ends = (recent.marks[key][0] for key in keys[: -LOOKED_BACK - 1 : -1] if key in recent.marks)
        return next((end for end in ends if end not in recent.deleted), keys[-1])

    def names(self, tenant: int, end: bytes) -> Sequence[bytes]:
        """Return keys of blocks of the request whose last block is `end`, the deepest first. They may include blocks of
        the request's answer, and may lack its last blocks."""
        recent = self._tenants.get(tenant)
        return (end,) if recent is None else recent.names.get(end, (end,))

    def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
        """Stop naming the blocks `keys` of `tenant`; None stands for all of its blocks."""
        if keys is None:
            self._tenants.pop(tenant, None)
        elif (recent := self._tenants.get(tenant)) is not None:
            for key in keys:
                recent.marks.pop(key, None)
                recent.names.pop(key, None)
                recent.parts.pop(key, None)
            recent.deleted.update(keys)

    def ends(self) -> Iterator[Array]:
        """Yield the last key and the deepest block of the latest requests of each tenant, in small arrays of dtype
        END.
        """
        yield np.empty(0, END)
        most = ENDS_MAX // max(1, len(self._tenants))
        for tenant, recent in list(self._tenants.items()):
            ends = list(recent.names)[-most:] if most else []
            for first in range(0, len(ends), COPIED):
                part = ((end, recent.names.get(end)) for end in ends[first : first + COPIED])
                known = [(tenant, end, names[0]) for end, names in part if names]
                yield np.array([row for row in known if row[2] not in recent.deleted], END)

    def restore(self, ends: Array) -> None:
        """Restore the requests from `ends`, the joined arrays that `ends()` yielded."""
        for tenant, end, deepest in ends.tolist():
            _keep(self._of(tenant).names, end, (deepest, end))

    def tidy(self) -> None:
        """Look through a part of the tables for names of deleted blocks and remove them. The owner calls `tidy` a few
        times a second.
        """
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
    """Go once through all tables. Blocks that are deleted meanwhile are left for the next time."""
    deleted, looked_for = recent.deleted, frozenset(recent.deleted)
    for at, end in enumerate(list(recent.names)):
        if at % TIDIED == TIDIED - 1:
            yield
        names = recent.names.get(end, ())
        if not deleted.isdisjoint(names):
            recent.names[end] = tuple(name for name in names if name not in deleted)
    for end, parts in list(recent.parts.items()):
        yield
        if not deleted.isdisjoint(parts):
            recent.parts.pop(end, None)
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
    """Return the last key, twice, and then the keys 1, 2, 4, … places before it."""
    steps = (2**step for step in range(len(keys).bit_length()))
    return (keys[-1], keys[-1], *(keys[-1 - step] for step in steps if step < len(keys)))


def _keep(table: OrderedDict[Key, Value], key: Key, value: Value) -> None:
    """Store `value` as the newest entry of `table`. When the table holds more than MARKS_MAX entries, forget the
    oldest.
    """
    table[key] = value
    table.move_to_end(key)
    if len(table) > MARKS_MAX:
        table.popitem(last=False)
