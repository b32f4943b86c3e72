"""Sums over stored blocks for operators: by tenant, by model, by prefix, or as the tree of all prefixes.

A prefix is the first `prefix_blocks` blocks of a chain. Chains with equal prefixes count together, under the key of the
prefix's last block. Blocks before it, and chains that are shorter, count under the chain's first block. The module only
reads, in slices, as `BlockList` does.
"""

from __future__ import annotations

import asyncio
import heapq
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.block_list import CLASSES, BlockList
from kvstored.admin.prefix_tree import BLOCKS, PAYLOAD, PrefixNode, PrefixTree, follow
from kvstored.admin.views import DaemonParts
from kvstored.clock import NS_PER_S
from kvstored.store.blocks import Residency
from kvstored.store.blocks.listing import Selection, column_of, pin_counts, select_all
from kvstored.tier_set import holding

DEFAULT_GROUPS, MAX_GROUPS = 50, 1000
GROUPINGS = ("tenant", "model", "prefix", "tree")

Int64Array = npt.NDArray[np.int64]


@dataclass
class _Sums:
    """The sums of one group. `slot_bytes` by tier; `last_ns` is the latest use."""

    blocks: int = 0
    payload_bytes: int = 0
    accesses: int = 0
    last_ns: int = 0
    longest: int = 0
    leases: int = 0
    slot_bytes: list[int] = field(default_factory=list)


class BlockTotals:
    """A service that sums the number and bytes of stored blocks for an operator, by tenant, model or prefix."""

    def __init__(self, parts: DaemonParts, blocks: BlockList) -> None:
        self._parts = parts
        self._store = parts.store
        self._blocks = blocks

    async def totals(self, request: pb.BlockTotalsRequest) -> pb.BlockTotalsReply:
        """Return the groups that `request` asks for, the ones with the most bytes first. Raises KVStoreError for an
        unknown grouping, tier, tenant, model or class.
        """
        if request.by not in GROUPINGS:
            raise KVStoreError(ErrorKind.INVALID, f"no totals by {request.by!r}; there are {', '.join(GROUPINGS)}")
        selection = self._blocks.selection(request.of)
        limit = min(request.limit or DEFAULT_GROUPS, MAX_GROUPS)
        if request.by == "tree":
            return await self._tree(selection, limit)
        heads: _Heads | None = None
        if request.by == "prefix":
            heads = await _Heads.find(self._store.residency, request.prefix_blocks or 1)
        groups = await self._sum(request.by, selection, heads)
        reply = pb.BlockTotalsReply(groups=len(groups))
        # In a thread: there may be a million groups, and the loop has its turns meanwhile.
        largest, reply.blocks, reply.payload_bytes = await asyncio.to_thread(_largest, groups, limit)
        for number, sums in largest:
            if heads is None or heads.is_current(self._store.residency, number):
                self._describe(request.by, number, sums, reply.totals.add())
        return reply

    async def _tree(self, selection: Selection, limit: int) -> pb.BlockTotalsReply:
        residency = self._store.residency
        tree = PrefixTree(residency, selection)
        await tree.find()
        reply = pb.BlockTotalsReply(groups=tree.nodes, blocks=tree.total(BLOCKS), payload_bytes=tree.total(PAYLOAD))
        now_ns, listed = self._store.clock.monotonic_ns(), dict[int, pb.BlockTotal]()
        nodes = await asyncio.to_thread(lambda: list(tree.largest(limit)))
        for node in nodes:
            ends = (node.first_row, node.last_row)
            if (node.above >= 0 and node.above not in listed) or not all(
                is_current(residency, row, tree.generation) for row in ends
            ):
                continue  # it has gone meanwhile, with what continues it
            total = reply.totals.add(own_blocks=node.own_blocks, branches=node.branches, residency=CLASSES[-1])
            total.parent = listed[node.above].key if node.above >= 0 else ""
            self._name(node.last_row, total)
            self._fill(node, total)
            fastest = residency.fastest(node.first_row)
            if fastest >= 0:
                total.residency = self._store.policies[fastest].residency_class(node.first_row, now_ns).value
            listed[node.last_row] = total
        for node in reversed(nodes):  # a prefix is needed as soon as what continues it
            if node.above >= 0 and node.last_row in listed:
                above = listed[node.above]
                above.residency = min(above.residency, listed[node.last_row].residency, key=CLASSES.index)
        return reply

    async def _sum(self, by: str, selection: Selection, heads: _Heads | None) -> dict[int, _Sums]:
        residency, groups = self._store.residency, dict[int, _Sums]()
        async for rows in select_all(residency, selection):
            if heads is not None:
                rows = rows[rows < len(heads.rows)]  # those behind came later
                numbers = heads.rows[rows].astype(np.int64)
            else:
                kinds = residency.kinds
                of_kind = [kind.tenant if by == "tenant" else kind.fingerprint_id for kind in kinds]
                numbers = np.array(of_kind, np.int64)[column_of(residency, "kind", rows)]
            self._add(groups, numbers, rows)
        return groups

    def _add(self, groups: dict[int, _Sums], numbers: Int64Array, rows: Int64Array) -> None:
        residency = self._store.residency
        found, place = np.unique(numbers, return_inverse=True)
        size = len(found)

        def summed(values: npt.NDArray[np.int64]) -> list[int]:
            sums = np.zeros(size, np.int64)
            np.add.at(sums, place, values)
            return [int(value) for value in sums]

        def largest(values: npt.NDArray[np.int64]) -> list[int]:
            most = np.zeros(size, np.int64)
            np.maximum.at(most, place, values)
            return [int(value) for value in most]

        blocks = summed(np.ones(len(rows), np.int64))
        payload = summed(column_of(residency, "payload_bytes", rows))
        accesses = summed(column_of(residency, "accesses", rows))
        last_ns = largest(column_of(residency, "last_access_ns", rows))
        longest = largest(column_of(residency, "depth", rows) + 1)
        leases = summed(pin_counts(residency, rows))
        mask = np.frombuffer(residency.rows.mask, np.uint8)[rows]
        slots = [
            summed(np.where(holding(mask, tier), np.asarray(copies.nbytes)[rows].astype(np.int64), 0))
            for tier, copies in enumerate(residency.copies)
        ]
        for position, number in enumerate(found.tolist()):
            sums = groups.get(number)
            if sums is None:
                sums = groups[number] = _Sums(slot_bytes=[0] * len(slots))
            sums.blocks += blocks[position]
            sums.payload_bytes += payload[position]
            sums.accesses += accesses[position]
            sums.leases += leases[position]
            sums.last_ns = max(sums.last_ns, last_ns[position])
            sums.longest = max(sums.longest, longest[position])
            for tier, nbytes in enumerate(slots):
                sums.slot_bytes[tier] += nbytes[position]

    def _describe(self, by: str, number: int, sums: _Sums, total: pb.BlockTotal) -> None:
        residency, tenants = self._store.residency, self._parts.tenants
        if by == "tenant":
            total.tenant = tenants.name_of_index(residency.tenants[number].name)
        elif by == "model":
            total.fingerprint = tenants.fingerprint_label(tenants.fingerprint_digest(number))
        else:
            self._name(number, total)
        total.leases = sums.leases
        self._fill(sums, total)

    def _name(self, row: int, total: pb.BlockTotal) -> str:
        """Name the block at `row`, its tenant and model in `total`. Return its key."""
        residency, tenants = self._store.residency, self._parts.tenants
        kind = residency.kind(row)
        total.key = residency.key(row).hex()
        total.tenant = tenants.name_of_index(residency.tenants[kind.tenant].name)
        total.fingerprint = tenants.fingerprint_label(tenants.fingerprint_digest(kind.fingerprint_id))
        return total.key

    def _fill(self, sums: _Sums | PrefixNode, total: pb.BlockTotal) -> None:
        residency = self._store.residency
        total.blocks = sums.blocks
        total.payload_bytes = sums.payload_bytes
        total.accesses = sums.accesses
        total.longest_blocks = sums.longest
        total.idle_s = max(0.0, (self._store.clock.monotonic_ns() - sums.last_ns) / NS_PER_S)
        for tier, name in enumerate(residency.tiers):
            total.tier_bytes[name] = sums.slot_bytes[tier]


class _Heads:
    """The row that stands for each row's prefix, at one moment: `rows[row]`."""

    def __init__(self, rows: npt.NDArray[np.int32], generation: npt.NDArray[np.uint32]) -> None:
        self.rows = rows
        self._generation = generation

    @classmethod
    async def find(cls, residency: Residency, prefix_blocks: int) -> _Heads:
        columns = residency.rows
        depth, heads = np.array(columns.depth), np.array(columns.parent, np.int32)
        generation = np.array(columns.generation)
        own = np.arange(len(heads), dtype=np.int32)
        is_head = (depth == prefix_blocks - 1) | (heads < 0)
        heads[is_head] = own[is_head]
        await follow(heads)
        return cls(heads, generation)

    def is_current(self, residency: Residency, row: int) -> bool:
        return is_current(residency, row, self._generation)


def is_current(residency: Residency, row: int, generation: npt.NDArray[np.uint32]) -> bool:
    """Return whether `row` still holds the block it held when `generation` was copied from the index."""
    return bool(residency.rows.generation[row] == generation[row]) and residency.rows.key(row) is not None


def _largest(groups: dict[int, _Sums], limit: int) -> tuple[list[tuple[int, _Sums]], int, int]:
    """Return the groups with the most bytes, and the blocks and bytes of all groups."""
    found = heapq.nsmallest(limit, groups.items(), key=lambda item: (-item[1].payload_bytes, item[0]))
    blocks = sum(sums.blocks for sums in groups.values())
    return found, blocks, sum(sums.payload_bytes for sums in groups.values())
