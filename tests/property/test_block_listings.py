"""Sorted listings and totals of blocks against plain loops over the same blocks."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.block_list import CLASSES, ORDERS, BlockList
from kvstored.admin.block_totals import BlockTotals
from kvstored.store.blocks import listing
from tests.reference.blocks import Shelf, key
from tests.reference.examples import examples

NOW_NS = 10**12
SIZES = (4096, 8192, 12288)
PRINTS = ("llama:00", "qwen:01")
# parent (-1: none), tenant and fingerprint of a chain's first block, size, tier, uses
_BLOCK = st.tuples(
    st.integers(-1, 30), st.integers(0, 1), st.integers(0, 1), st.sampled_from(SIZES), st.integers(0, 1),
    st.integers(0, 4),
)  # fmt: skip


class Listed:
    """Blocks in a residency of two tiers, and their plain records in row order of their numbers."""

    def __init__(self, drawn: list[tuple[int, ...]]) -> None:
        self.shelf, self.records = Shelf("host", "nvme", tenants=2), []
        residency = self.shelf.residency
        for number, (parent, tenant, print_, size, tier, uses) in enumerate(drawn):
            chain: dict[str, Any] | None = self.records[parent] if 0 <= parent < number else None
            if chain is not None:
                tenant, print_ = chain["tenant"], chain["print"]
            row = residency.insert(
                tenant, key(number), NO_PARENT if chain is None else key(chain["number"]), fingerprint_id=print_,
                group=0, depth=0 if chain is None else chain["depth"] + 1, payload_bytes=size, now_ns=number,
            )  # fmt: skip
            residency.attach(row, tier, self.shelf.slot(size), number)
            for _ in range(uses):
                residency.touch_run([row], NOW_NS - 1000 * uses)
            self.records.append(
                {
                    "number": number, "row": row, "tenant": tenant, "print": print_, "size": size, "tier": tier,
                    "chain": [*(chain["chain"] if chain else []), number], "depth": chain["depth"] + 1 if chain else 0,
                }
            )  # fmt: skip
        labels = SimpleNamespace(
            number=lambda name, _: int(name), name_of_index=lambda name: name.removeprefix("tenant-"),
            fingerprint_label=lambda digest: PRINTS[digest[0]], fingerprint_digest=lambda number: bytes([number] * 32),
        )  # fmt: skip
        warm = SimpleNamespace(residency_class=lambda row, now_ns: SimpleNamespace(value=CLASSES[row % 3]))
        store = SimpleNamespace(
            residency=residency, clock=SimpleNamespace(monotonic_ns=lambda: NOW_NS), policies=(warm, warm)
        )
        parts: Any = SimpleNamespace(store=store, tenants=labels)
        describe = lambda row, block: setattr(block, "key", residency.key(row).hex())  # noqa: E731
        views: Any = SimpleNamespace(parts=parts, describe=describe)
        self.list = BlockList(views)
        self.totals = BlockTotals(parts, self.list)

    def value(self, record: dict[str, Any], order: str) -> int:
        residency, row = self.shelf.residency, record["row"]
        return {
            "size": record["size"],
            "uses": residency.accesses(row),
            "idle": -residency.last_access_ns(row),
            "depth": record["depth"],
            "children": residency.children(row),
            "leases": residency.pin_count(row),
        }[order]


def _matches(record: dict[str, Any], wanted: pb.BlocksRequest) -> bool:
    return (
        (not wanted.tenant or int(wanted.tenant) == record["tenant"])
        and (not wanted.tier or ("host", "nvme").index(wanted.tier) == record["tier"])
        and (not wanted.model or wanted.model in PRINTS[record["print"]])
    )


_FILTER = st.builds(
    pb.BlocksRequest, tenant=st.sampled_from(["", "0", "1"]), tier=st.sampled_from(["", "host", "nvme"]),
    model=st.sampled_from(["", "llama", "qwen"]),
)  # fmt: skip


def _has_model(listed: Listed, wanted: pb.BlocksRequest) -> bool:
    return not wanted.model or any(wanted.model in PRINTS[record["print"]] for record in listed.records)


@pytest.fixture(autouse=True, scope="module")
def short_slices() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "_SCAN_ROWS", 7)
        yield


@settings(max_examples=examples(120), deadline=None)
@given(
    st.lists(_BLOCK, min_size=1, max_size=40), _FILTER, st.sampled_from(sorted(ORDERS)), st.booleans(),
    st.integers(1, 12),
)  # fmt: skip
def test_a_sorted_listing_has_the_most_first(
    drawn: list[tuple[int, ...]], wanted: pb.BlocksRequest, order: str, reverse: bool, limit: int
) -> None:
    listed = Listed(drawn)
    listed.shelf.residency.pin(listed.records[0]["row"])
    request = pb.BlocksRequest(sort=order, reverse=reverse, limit=limit)
    request.MergeFrom(wanted)
    if not _has_model(listed, wanted):
        with pytest.raises(KVStoreError, match="no model"):
            asyncio.run(listed.list.blocks(request))
        return
    reply = asyncio.run(listed.list.blocks(request))
    found = [block.key for block in reply.blocks]
    by_key = {key(record["number"]).hex(): record for record in listed.records}
    chosen = [record for record in listed.records if _matches(record, wanted)]
    values = sorted((listed.value(record, order) for record in chosen), reverse=not reverse)
    assert [listed.value(by_key[name], order) for name in found] == values[:limit]
    assert reply.total == len(chosen)
    assert len(set(found)) == len(found) and all(_matches(by_key[name], wanted) for name in found)


@settings(max_examples=examples(120), deadline=None)
@given(st.lists(_BLOCK, min_size=1, max_size=40), _FILTER, st.sampled_from(["tenant", "model", "prefix"]),
       st.integers(1, 4))  # fmt: skip
def test_totals_are_the_sums_of_their_blocks(
    drawn: list[tuple[int, ...]], wanted: pb.BlocksRequest, by: str, prefix_blocks: int
) -> None:
    listed = Listed(drawn)
    if not _has_model(listed, wanted):
        return

    def name(record: dict[str, Any]) -> str:
        if by == "tenant":
            return str(record["tenant"])
        if by == "model":
            return PRINTS[record["print"]]
        chain = record["chain"]
        return key(chain[prefix_blocks - 1] if len(chain) >= prefix_blocks else chain[0]).hex()

    blocks, nbytes, host_bytes = Counter[str](), Counter[str](), Counter[str]()
    for record in listed.records:
        if _matches(record, wanted):
            blocks[name(record)] += 1
            nbytes[name(record)] += record["size"]
            host_bytes[name(record)] += record["size"] if record["tier"] == 0 else 0
    request = pb.BlockTotalsRequest(of=wanted, by=by, prefix_blocks=prefix_blocks)
    reply = asyncio.run(listed.totals.totals(request))
    named = {"tenant": "tenant", "model": "fingerprint", "prefix": "key"}[by]
    assert {getattr(total, named): total.blocks for total in reply.totals} == dict(blocks)
    assert {getattr(total, named): total.payload_bytes for total in reply.totals} == dict(nbytes)
    assert Counter({getattr(total, named): total.tier_bytes["host"] for total in reply.totals}) == host_bytes
    assert [total.payload_bytes for total in reply.totals] == sorted(nbytes.values(), reverse=True)
    assert (reply.groups, reply.blocks, reply.payload_bytes) == (len(blocks), blocks.total(), nbytes.total())


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(_BLOCK, min_size=1, max_size=40), _FILTER, st.integers(1, 40))
def test_the_tree_has_a_node_for_each_run_between_two_partings(
    drawn: list[tuple[int, ...]], wanted: pb.BlocksRequest, limit: int
) -> None:
    listed = Listed(drawn)
    if not _has_model(listed, wanted):
        return
    request = pb.BlockTotalsRequest(of=wanted, by="tree", limit=limit)
    reply = asyncio.run(listed.totals.totals(request))
    kids = Counter(record["chain"][-2] for record in listed.records if len(record["chain"]) > 1)
    runs: dict[int, list[int]] = {}  # by their last block
    for record in listed.records:
        if kids[record["number"]] != 1:
            parted = [at for at, number in enumerate(record["chain"][:-1]) if kids[number] != 1]
            runs[record["number"]] = record["chain"][parted[-1] + 1 if parted else 0 :]
    chosen = [record for record in listed.records if _matches(record, wanted)]
    stored = {
        last for last in runs if any(last in record["chain"] or record["number"] in runs[last] for record in chosen)
    }
    assert (reply.groups, reply.blocks) == (len(stored), len(chosen))
    assert reply.payload_bytes == sum(record["size"] for record in chosen)
    assert len(reply.totals) == min(limit, len(stored))
    seen, numbered = {""}, {key(record["number"]).hex(): record for record in listed.records}
    for total in reply.totals:
        last = numbered[total.key]["number"]
        assert last in stored
        behind = [record for record in chosen if runs[last][0] in record["chain"]]
        above = listed.records[runs[last][0]]["chain"][:-1]
        assert total.parent == (key(above[-1]).hex() if above else "") and total.parent in seen
        assert total.own_blocks == sum(record["number"] in runs[last] for record in chosen)
        assert (total.blocks, total.payload_bytes) == (len(behind), sum(record["size"] for record in behind))
        assert total.tier_bytes["host"] == sum(record["size"] for record in behind if record["tier"] == 0)
        assert total.longest_blocks == max(record["depth"] + 1 for record in behind)
        assert total.branches == sum(listed.records[runs[other][0]]["chain"][:-1][-1:] == [last] for other in stored)
        below = [total, *(each for each in reply.totals if last in numbered[each.key]["chain"])]
        assert total.residency == min(
            (CLASSES[listed.records[runs[numbered[each.key]["number"]][0]]["row"] % 3] for each in below),
            key=CLASSES.index,
        )
        seen.add(total.key)
    least = min(total.payload_bytes for total in reply.totals) if reply.totals else 0
    left = [runs[last][0] for last in stored if key(last).hex() not in seen]
    tops = [first for first in left if not listed.records[first]["chain"][:-1]]
    sizes = [sum(record["size"] for record in chosen if first in record["chain"]) for first in tops]
    assert all(size <= least for size in sizes), "the largest are listed"


def test_what_does_not_exist_is_named(drawn: tuple[int, ...] = (-1, 0, 0, 4096, 0, 1)) -> None:
    listed = Listed([drawn])
    for request, said in (
        (pb.BlocksRequest(sort="age"), "sort by size, uses, idle"),
        (pb.BlocksRequest(residency="tepid"), "classes are hot, warm, cold"),
        (pb.BlocksRequest(tier="tape"), "host, nvme"),
        (pb.BlocksRequest(model="gpt"), "stored: llama:00"),
    ):
        with pytest.raises(KVStoreError, match=said):
            asyncio.run(listed.list.blocks(request))
    with pytest.raises(KVStoreError, match="there are tenant, model, prefix, tree"):
        asyncio.run(listed.totals.totals(pb.BlockTotalsRequest(by="moon")))
