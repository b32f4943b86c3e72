"""An operator's order how long stored blocks are kept: time to live, priority and pins, for a selection of a tenant.

A tenant's own clients say so by touch; this is for blocks by key, model or tenant. It works in slices, so that lookups
are answered meanwhile. What a pin may hold is checked before anything is changed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.terms import NO_TERMS, Terms
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.block_list import BlockList
from kvstored.clients.codes import terms_of
from kvstored.store.assembly import Store
from kvstored.store.blocks.listing import column_of, descendants, select_all, tokens_of

SLICE_ROWS = 256
MIN_KEY_DIGITS = 6


class Keeping:
    """A service by which an operator sets the terms of stored blocks. `blocks` selects them."""

    def __init__(self, store: Store, blocks: BlockList) -> None:
        self._store, self._residency, self._blocks = store, store.residency, blocks
        self._turn = asyncio.Lock()

    async def keep(self, request: pb.KeepRequest) -> pb.KeepReply:
        """Set the terms in `request` of the blocks that it selects, and return how many these are. Raises KVStoreError,
        having changed nothing, for a selection of nothing and for pins that are not allowed."""
        if not request.tenant:
            raise KVStoreError(ErrorKind.INVALID, "name the tenant whose blocks are meant (see: kvctl tenants)")
        if request.all + bool(request.model) + bool(request.key_prefix) != 1:
            raise KVStoreError(ErrorKind.INVALID, "say which blocks by one of: a key, a model, all")
        terms = terms_of(request.terms)
        if terms == NO_TERMS:
            raise KVStoreError(ErrorKind.INVALID, "say what is to hold: the owner of a pin, or a time to live")
        wanted = pb.BlocksRequest(tenant=request.tenant, model=request.model, key_prefix=request.key_prefix)
        tenant = self._blocks.selection(wanted).tenant
        assert tenant is not None
        self._store.retention.check(tenant, terms, 0)
        async with self._turn:
            tokens = await self._selected(wanted, below=request.below)
            let_go = await self._hold(tenant, terms, tokens)
            try:
                return await self._set(tokens, terms, is_chain=bool(request.key_prefix) and not request.below)
            finally:
                let_go()

    async def _hold(self, tenant: int, terms: Terms, tokens: Sequence[int]) -> Callable[[], None]:
        """Reserve what the pins in `terms` will hold, so that no put takes it meanwhile; return what ends that. Raises
        KVStoreError when it is more than is allowed."""
        pins, of_tenant, of_owner = self._store.retention.pins, 0, 0
        async for rows in self._slices(tokens if terms.pin else ()):
            more = pins.more_bytes(tenant, terms.pin, rows)
            of_tenant, of_owner = of_tenant + more[0], of_owner + more[1]
        if terms.pin:
            pins.check_bytes(tenant, terms.pin, of_tenant, of_owner)
        return pins.hold(tenant, terms.pin, of_owner)

    async def _set(self, tokens: Sequence[int], terms: Terms, *, is_chain: bool) -> pb.KeepReply:
        retention, residency, reply = self._store.retention, self._residency, pb.KeepReply()
        expires_s = retention.expiry(terms.ttl_s or 0)  # one for all, however long this takes
        async for rows in self._slices(tokens):
            if terms.ttl_s is not None and not is_chain:  # with all that continues them
                retention.end_all_at(rows, expires_s)
            retention.change(rows[::-1], terms if is_chain else terms._replace(ttl_s=None))
            reply.blocks += len(rows)
            reply.bytes += sum(map(residency.payload_bytes, rows))
        if terms.ttl_s is not None:
            for _ in retention.settle_chains():
                await asyncio.sleep(0)
        return reply

    async def _slices(self, tokens: Sequence[int]) -> AsyncIterator[list[int]]:
        """Yield the rows of `tokens` that are stored still, some at a time, and let other tasks run after each."""
        for first in range(0, len(tokens), SLICE_ROWS):
            some = map(int, tokens[first : first + SLICE_ROWS])
            yield [row for row in map(self._residency.current, some) if row >= 0]
            await asyncio.sleep(0)

    async def _selected(self, wanted: pb.BlocksRequest, *, below: bool) -> Sequence[int]:
        """Return tokens of the selected blocks, children before parents: with a key, the block, and its ancestors or,
        with `below`, all blocks that continue it."""
        residency, digits = self._residency, wanted.key_prefix
        if digits and len(digits) < MIN_KEY_DIGITS:
            raise KVStoreError(ErrorKind.INVALID, f"a key is its first {MIN_KEY_DIGITS} hex digits or more")
        parts: list[npt.NDArray[Any]] = [np.empty(0, np.uint64)]
        depths: list[npt.NDArray[Any]] = [np.empty(0, np.uint32)]
        async for rows in select_all(residency, self._blocks.selection(wanted)):
            parts.append(tokens_of(residency, rows))
            depths.append(column_of(residency, "depth", rows))
        if not digits:
            return cast(Sequence[int], await asyncio.to_thread(_deepest_first, parts, depths))
        tokens: list[int] = np.concatenate(parts).tolist()
        if len(tokens) != 1:
            why = f"{len(tokens)} keys begin with it: give more digits" if tokens else "no stored block has such a key"
            raise KVStoreError(ErrorKind.NOT_FOUND if not tokens else ErrorKind.INVALID, f"{digits}: {why}")
        row = residency.current(tokens[0])
        if below and row >= 0:
            return await self._below(row) + tokens
        while row >= 0 and (row := residency.parent(row)) >= 0:
            if residency.tier_mask(row):
                tokens.append(residency.token(row))
        return tokens

    async def _below(self, row: int) -> list[int]:
        """Return tokens of the stored blocks that continue the block at `row`."""
        residency, columns = self._residency, self._residency.rows
        is_stored, generations = np.array(columns.mask) != 0, np.array(columns.generation)
        rows = await asyncio.to_thread(descendants, np.array(columns.parent), [row])
        rows = rows[is_stored[rows]]
        rows = rows[np.argsort(np.array(columns.depth)[rows])[::-1]]
        tokens: list[int] = []
        for first in range(0, len(rows), SLICE_ROWS):
            for each in rows[first : first + SLICE_ROWS].tolist():
                # Another block may have the row by now, another tenant's even.
                if columns.generation[each] == generations[each] and residency.tier_mask(each):
                    tokens.append(residency.token(each))
            await asyncio.sleep(0)
        return tokens


def _deepest_first(tokens: list[npt.NDArray[Any]], depths: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(tokens)[np.argsort(np.concatenate(depths), kind="stable")[::-1]]
