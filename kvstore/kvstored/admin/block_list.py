"""The listing of blocks for operators: pages in row order, or the first blocks by some order.

The module only reads. It works in slices, so that lookups are answered meanwhile: a block that is stored or removed
during a listing may be included or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.views import Views, tier_named
from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import Selection, column_of, page, pin_counts, select_all
from kvstored.store.policies import ResidencyClass

DEFAULT_PAGE, MAX_PAGE = 100, 1000
CLASSES = tuple(kind.value for kind in ResidencyClass)
MIN_DIGEST_DIGITS = 6

Int64Array = npt.NDArray[np.int64]
Order = Callable[[Residency, Int64Array], Int64Array]


def _column(name: str) -> Order:
    return lambda residency, rows: column_of(residency, name, rows)


# The largest first: for "idle" the block that was not used for longest.
ORDERS: Mapping[str, Order] = {
    "size": _column("payload_bytes"),
    "uses": _column("accesses"),
    "idle": lambda residency, rows: -column_of(residency, "last_access_ns", rows),
    "depth": _column("depth"),
    "children": _column("links"),
    "leases": pin_counts,
}


class BlockList:
    """A service that lists stored blocks for an operator, one page at a time."""

    def __init__(self, views: Views) -> None:
        self._parts = views.parts
        self._store = views.parts.store
        self._views = views

    async def blocks(self, request: pb.BlocksRequest) -> pb.BlocksReply:
        """Return a page of the blocks that `request` selects. Raises KVStoreError for a tier, tenant, model, class or
        order that does not exist.
        """
        residency = self._store.residency
        selection = self.selection(request)
        limit = min(request.limit or DEFAULT_PAGE, MAX_PAGE)
        tenant = selection.tenant
        reply = pb.BlocksReply(total=len(residency) if tenant is None else residency.tenant_blocks(tenant))
        if request.sort:
            rows, reply.total = await self._first_of(_order(request.sort), selection, limit, reverse=request.reverse)
            for row in rows:
                self._views.describe(row, reply.blocks.add())
            return reply
        cursor = request.after
        while len(reply.blocks) < limit:
            found = page(residency, selection, after=cursor, limit=limit - len(reply.blocks))
            for row in found.rows:
                self._views.describe(row, reply.blocks.add())
            cursor = found.next
            if not cursor:
                break
            await asyncio.sleep(0)
        reply.next = cursor
        return reply

    def selection(self, wanted: pb.BlocksRequest) -> Selection:
        """Return the filter of blocks that the message `wanted` describes. Raises KVStoreError for a tier, tenant,
        model or class that does not exist."""
        parts, residency = self._parts, self._store.residency
        if wanted.residency and wanted.residency not in CLASSES:
            raise KVStoreError(ErrorKind.INVALID, f"no class {wanted.residency!r}; classes are {', '.join(CLASSES)}")
        return Selection(
            tenant=parts.tenants.number(wanted.tenant, residency) if wanted.tenant else None,
            tier=tier_named(residency, wanted.tier) if wanted.tier else None,
            prints=self._prints(wanted.model) if wanted.model else None,
            key_prefix=wanted.key_prefix.lower(),
            matches=self._is_of_class(wanted.residency) if wanted.residency else None,
        )

    def _is_of_class(self, wanted: str) -> Callable[[int], bool]:
        store, now_ns = self._store, self._store.clock.monotonic_ns()

        def is_of_class(row: int) -> bool:
            fastest = store.residency.fastest(row)
            return fastest >= 0 and store.policies[fastest].residency_class(row, now_ns).value == wanted

        return is_of_class

    def _prints(self, model: str) -> frozenset[int]:
        """Return the fingerprints whose label contains `model` or whose digest begins with it."""
        tenants = self._parts.tenants
        stored = {number for index in self._store.residency.tenants for number in index.fingerprints}
        labels = {number: tenants.fingerprint_label(tenants.fingerprint_digest(number)) for number in stored}
        wanted = model.lower()
        found = frozenset(
            number
            for number, label in labels.items()
            if wanted in label.lower()
            or (len(wanted) >= MIN_DIGEST_DIGITS and tenants.fingerprint_digest(number).hex().startswith(wanted))
        )
        if not found:
            known = ", ".join(sorted(labels.values())) or "none yet"
            raise KVStoreError(ErrorKind.NOT_FOUND, f"no model {model!r} has stored blocks; stored: {known}")
        return found

    async def _first_of(
        self, order: Order, selection: Selection, limit: int, *, reverse: bool
    ) -> tuple[list[int], int]:
        """Return the rows of the `limit` largest by `order`, or the smallest, and how many rows are selected in all.
        Equal ones are in row order.
        """
        residency = self._store.residency
        tokens, values = np.empty(0, np.uint64), np.empty(0, np.int64)
        selected = 0
        async for rows in select_all(residency, selection):
            selected += len(rows)
            here = order(residency, rows) * (-1 if reverse else 1)
            best = np.argsort(-here, kind="stable")[:limit]
            names = np.fromiter(map(residency.token, rows[best].tolist()), np.uint64, len(best))
            values, tokens = np.concatenate([values, here[best]]), np.concatenate([tokens, names])
            best = np.argsort(-values, kind="stable")[:limit]
            values, tokens = values[best], tokens[best]
        found = map(residency.current, tokens.tolist())
        return [row for row in found if row >= 0 and residency.tier_mask(row)], selected


def _order(name: str) -> Order:
    order = ORDERS.get(name)
    if order is None:
        raise KVStoreError(ErrorKind.INVALID, f"no order {name!r}; sort by {', '.join(ORDERS)}")
    return order
