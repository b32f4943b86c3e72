"""The learned state of chain-hazard, as arrays from which a later process can continue.

Chains are named by the blocks that they own, blocks by key and tenant. Blocks that are in the tier again get their
chain back; the ghost remembers the others, as if they had left. Not kept: requests under way, queued requests, the
order of candidates. The module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore_predictor.ages import BINS, EDGES_S, Ints, passed_by
from kvstore_predictor.base import Array, Piece, State
from kvstore_predictor.features import Features
from kvstore_predictor.ladders import STEP, Ladder, ladders_of
from kvstore_predictor.observations import LATE
from kvstored.store.blocks.rows import as_array
from kvstored.store.policies.base import Origin
from kvstored.store.policies.chains.book import NS, UNKNOWN, UNOWNED, ChainBook
from kvstored.store.policies.chains.follower import ChainFollower
from kvstored.store.policies.chains.ghost import FAN_BITS, FAN_MAX
from kvstored.store.policies.chains.table import CHAIN

FORMAT = 1
GHOSTS_KEPT = 1 << 18  # keys of blocks that have left, over all tenants
_STEP_ROWS, _STEP_NAMES = 2048, 256  # looked at between two pauses: 0.3 ms
_STAYED = 0.9  # of the blocks: else the guard would compare a tier that was emptied with an LRU that was not
_KEYED = np.dtype([("key", "V16"), ("tenant", "<i4"), ("packed", "<i8")])  # chain and fan-out, as in the ghost
_TOUCHED = np.dtype([("key", "V16"), ("tenant", "<i4"), ("touches", "<f8"), ("as_of_s", "<f8")])
_NAMED = np.dtype([("key", "V16"), ("tenant", "<i4")])
_EXPECTED = {
    "chains": CHAIN, "rows": _KEYED, "young": _KEYED, "old": _KEYED, "touched": _TOUCHED, "shadow": _NAMED,
    "steps": STEP, "late": LATE,
}  # fmt: skip
Rows = npt.NDArray[np.int64]


def pieces(follower: ChainFollower) -> Iterator[Piece]:
    """Yield the learned state of `follower` as named arrays, a step at a time."""
    book, guard = follower.book, follower.guard
    yield "signature", signature(book.tables.orders)
    yield "follower", np.array([follower.now_s, follower.was_full])
    yield "book", np.array(book.numbers())
    yield "learning", np.array(book.learning.numbers())
    for chains in book.chains.copied():  # before the rows: a row whose chain is newer than these is left out
        yield "chains", chains
    for first in range(0, len(book.owner), _STEP_ROWS):
        yield "rows", _rows(book, first)
        yield "touched", _shared_rows(book, first)
    for tenant, ghost in enumerate(book.ghosts):
        for generation, keys, packed in ghost.copied(GHOSTS_KEPT // len(book.ghosts)):
            yield generation, _table(_KEYED, np.frombuffer(keys, "V16"), tenant, packed=packed)
        touches, as_of_s = np.fromiter(chain.from_iterable(ghost.touched.values()), np.float64).reshape(-1, 2).T
        keys = b"".join(ghost.touched)
        yield "touched", _table(_TOUCHED, np.frombuffer(keys, "V16"), tenant, touches=touches, as_of_s=as_of_s)
    yield from book.tables.copied()
    yield "guard", np.array(guard.numbers(), np.float64)
    shadow = guard.shadow()
    for first in range(0, len(shadow), _STEP_NAMES):
        tenants, names = zip(*shadow[first : first + _STEP_NAMES], strict=True)
        yield "shadow", _table(_NAMED, np.frombuffer(b"".join(names), "V16"), np.array(tenants, np.int64))


def signature(orders: Sequence[Sequence[str]]) -> Array:
    """Return an array that encodes everything on which the meaning of a saved state depends; `orders` are the feature
    orders of the hazard tables. A policy can continue from a state only if its own signature is equal."""
    meaning = {"format": FORMAT, "edges_s": EDGES_S.round(6).tolist(), "features": Features._fields, "orders": orders}
    return np.frombuffer(json.dumps(meaning).encode(), np.uint8)


def ladders(state: State, orders: Sequence[Sequence[str]]) -> list[Ladder]:
    """Return the hazard tables in `state`, for a policy whose feature orders are `orders`. Raises ValueError for a
    state of another version or other orders, or without tables.
    """
    if not np.array_equal(state.get("signature", np.empty(0)), signature(orders)):
        raise ValueError("it is of another version or learned by other features")
    for name, dtype in _EXPECTED.items():
        if name in state and state[name].dtype != dtype:
            raise ValueError(f"its {name} are of another kind")
    steps = state.get("steps", np.empty(0, STEP))
    if len(steps) and not 0 <= steps["path"][:, 0].min() <= steps["path"][:, 0].max() < len(orders):
        raise ValueError("its steps are of ladders that are not there")
    return ladders_of(orders, steps)


class _Blocks(NamedTuple):
    """Blocks of a state: rows here (-1: not stored), keys, tenants here, and the chain, as numbered there, and fan-out
    of each.
    """

    rows: Rows
    keys: npt.NDArray[np.void]
    tenants: Ints
    packed: Ints

    @property
    def chains(self) -> Ints:
        return self.packed >> FAN_BITS

    def at(self, which: Array) -> _Blocks:
        return _Blocks(self.rows[which], self.keys[which], self.tenants[which], self.packed[which])


def restore(follower: ChainFollower, state: State, origin: Origin) -> None:
    """Let `follower` continue from `state`. It was made with the tables of `ladders` and has adopted the present
    blocks. Raises ValueError or another error for an inconsistent state; `follower` must not be used then.
    """
    book, later_s = follower.book, origin.later_ns * NS
    for tenant in range(int(origin.tenants.max(initial=-1)) + 1):
        follower.know_tenant(tenant)
    old = state.get("chains", np.empty(0, CHAIN))
    blocks = {name: _blocks(book, state, name, origin, len(old)) for name in ("rows", "young", "old")}
    used = np.unique(np.concatenate([each.chains for each in blocks.values()]))
    numbers = np.full(len(old), UNOWNED, np.int64)
    numbers[used] = np.arange(len(used))
    then_s, was_full = state["follower"].tolist()
    book.restore(state["book"].tolist(), later_s, follower.lru.rows)
    book.learning.restore(state["learning"].tolist())
    chains = old[used]
    chains["tenant"] = origin.tenants[chains["tenant"]]
    chains["used_s"] += later_s
    chains["order"] = np.argsort(np.argsort(chains["order"])) - len(chains)  # older than all later uses
    # While there was no daemon there could be no return.
    passed = passed_by(origin.now_ns * NS - chains["used_s"]) - passed_by(then_s + later_s - chains["used_s"])
    chains["bin"] = np.clip(chains["bin"] + np.maximum(passed, 0), 0, BINS)
    _restore_classes(book, state, chains)
    book.chains.restore(chains)
    book.chains.floats(book.chains.base)[:] = book.standings(np.arange(len(chains)), origin.now_ns * NS)
    stayed = _restore_blocks(follower, blocks, numbers)
    _restore_touches(book, state, origin)
    follower.now_s, follower.was_full = origin.now_ns * NS, bool(was_full) or follower.was_full
    if stayed >= _STAYED * len(state.get("rows", ())):
        shadow = state.get("shadow", np.empty(0, _NAMED))
        tenants = origin.tenants[shadow["tenant"]].tolist()
        held = zip(tenants, shadow["key"].tolist(), strict=True)
        follower.guard.restore(state["guard"].tolist(), [name for name in held if name[0] >= 0])


def _restore_classes(book: ChainBook, state: State, chains: npt.NDArray[np.void]) -> None:
    """Restore the classes of `chains`, and their observations; `chains` have the new class numbers afterwards."""
    old, tables = state.get("cells", np.empty((0, len(Features._fields)), np.int8)), book.tables
    late = state.get("late", np.empty(0, LATE))["cell"]
    numbers = np.full(len(old), -1, np.int64)
    features: dict[int, Features] = {}
    for cell in np.union1d(np.unique(chains["cell"]), late).astype(np.int64).tolist():
        features[cell] = Features(*old[cell].tolist())
        numbers[cell] = tables.cell(features[cell])
    book.features[:] = [features[cell] for cell in chains["cell"].tolist()]
    chains["cell"] = numbers[chains["cell"]]
    tables.restore(state, numbers)


def _restore_blocks(follower: ChainFollower, blocks: dict[str, _Blocks], numbers: Ints) -> int:
    """Give blocks that are in the tier their chains, and the others to the ghost; return how many were in the tier
    before and are.
    """
    book, stayed = follower.book, 0
    owner, fan = np.frombuffer(book.owner, np.int32), np.frombuffer(book.fan, np.uint8)
    depth = as_array(book.residency.rows.depth)
    for name, each in blocks.items():
        is_here = (each.rows >= 0) & (each.rows < len(owner))
        is_here[is_here] = owner[each.rows[is_here]] == UNKNOWN
        here, gone = each.at(is_here), each.at(~is_here)
        if name != "rows":  # the ghost of a block that was stored again
            gone = gone.at(~_is_in(book, gone.rows))
        order = np.argsort(depth[here.rows], kind="stable")
        here = here.at(order)
        here = here.at(_are_on_paths(book, here))
        owner[here.rows] = chains = numbers[here.chains]
        fan[here.rows] = here.packed & FAN_MAX
        np.frombuffer(book.chains.tail, np.int32)[chains] = here.rows  # the deepest is the last
        follower.unknown -= len(here.rows)
        stayed += len(here.rows) if name == "rows" else 0
        packed = numbers[gone.chains] << FAN_BITS | gone.packed & FAN_MAX
        for tenant, ghost in enumerate(book.ghosts):
            theirs = gone.tenants == tenant
            ghost.restore("old" if name == "old" else "young", gone.keys[theirs], packed[theirs])
    return stayed


def _are_on_paths(book: ChainBook, blocks: _Blocks) -> npt.NDArray[np.bool_]:
    """Return which of `blocks`, the deepest last, belong to chains whose blocks hang together: a chain may have got
    another one's number while it was copied.
    """
    order = np.argsort(blocks.chains, kind="stable")
    rows, chains = blocks.rows[order], blocks.chains[order]
    depth = as_array(book.residency.rows.depth)[rows].astype(np.int64)
    steps, parents = np.diff(depth), np.frombuffer(book.residency.rows.parent, np.int32)[rows[1:]]
    is_torn = (chains[1:] == chains[:-1]) & ((steps == 0) | ((steps == 1) & (parents != rows[:-1])))
    return ~np.isin(blocks.chains, chains[1:][is_torn])


def _is_in(book: ChainBook, rows: Rows) -> npt.NDArray[np.bool_]:
    """Return which of `rows` (-1: none) are in the tier, owned or not."""
    owner = np.frombuffer(book.owner, np.int32)
    found: npt.NDArray[np.bool_] = (rows >= 0) & (rows < len(owner))
    found[found] = owner[rows[found]] != UNOWNED
    return found


def _restore_touches(book: ChainBook, state: State, origin: Origin) -> None:
    touched = state.get("touched", np.empty(0, _TOUCHED))
    as_of_s = touched["as_of_s"] + origin.later_ns * NS
    tenants = origin.tenants[touched["tenant"]]
    rows = _find(book, touched["key"], tenants)
    is_here = _is_in(book, rows)
    np.frombuffer(book.shared, np.float64)[rows[is_here]] = touched["touches"][is_here]
    np.frombuffer(book.shared_s, np.float64)[rows[is_here]] = as_of_s[is_here]
    gone = ~is_here & (tenants >= 0)
    columns = tenants[gone], touched["key"][gone], touched["touches"][gone], as_of_s[gone]
    for tenant, key, touches, since_s in zip(*(column.tolist() for column in columns), strict=True):
        book.ghosts[tenant].remember_touches(key, touches, since_s)


# Tables of blocks


def _rows(book: ChainBook, first: int) -> Array:
    """Return the blocks of the tier from row `first` on that chains own."""
    rows = first + np.flatnonzero(np.frombuffer(book.owner, np.int32)[first : first + _STEP_ROWS] >= 0)
    packed = np.frombuffer(book.owner, np.int32)[rows].astype(np.int64) << FAN_BITS
    packed |= np.frombuffer(book.fan, np.uint8)[rows]
    return _of_rows(book, _KEYED, rows, packed=packed)


def _shared_rows(book: ChainBook, first: int) -> Array:
    rows = first + np.flatnonzero(np.frombuffer(book.shared, np.float64)[first : first + _STEP_ROWS])
    touches, as_of_s = (np.frombuffer(column, np.float64)[rows] for column in (book.shared, book.shared_s))
    return _of_rows(book, _TOUCHED, rows, touches=touches, as_of_s=as_of_s)


def _of_rows(book: ChainBook, dtype: np.dtype[np.void], rows: Rows, **columns: Array) -> Array:
    keys, bulk_key = book.residency.rows.keys, book.residency.rows.bulk_key
    packed_keys = b"".join([keys[row] or bulk_key(row) for row in rows.tolist()])
    tenants = book.residency.tenants_of(rows) if len(rows) else 0
    return _table(dtype, np.frombuffer(packed_keys, "V16"), tenants, **columns)


def _table(dtype: np.dtype[np.void], keys: Array, tenants: Ints | int, **columns: Array) -> Array:
    found = np.empty(len(keys), dtype)
    found["key"], found["tenant"] = keys, tenants
    for name, column in columns.items():
        found[name] = column
    return found


def _blocks(book: ChainBook, state: State, name: str, origin: Origin, chains: int) -> _Blocks:
    """Return the blocks of present tenants and of chains below `chains`, with the present tenant numbers."""
    table = state.get(name, np.empty(0, _KEYED))
    known = (table["packed"] >= 0) & (table["packed"] >> FAN_BITS < chains)
    table = table[known]
    tenants = origin.tenants[table["tenant"]]
    table, tenants = table[tenants >= 0], tenants[tenants >= 0]
    return _Blocks(_find(book, table["key"], tenants), table["key"], tenants, table["packed"])


def _find(book: ChainBook, keys: npt.NDArray[np.void], tenants: Ints) -> Rows:
    """Return the row of each block that is stored, or -1."""
    rows = np.full(len(keys), -1, np.int64)
    for tenant in np.unique(tenants[tenants >= 0]).tolist():
        theirs = np.flatnonzero(tenants == tenant)
        rows[theirs] = book.residency.find_column(tenant, keys[theirs])
    return rows
