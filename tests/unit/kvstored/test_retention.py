"""Expiry, priority and pins: the table of docs/policies.md, row by row, and what it leaves out."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest

from kvstore_proto.errors import KVStoreError
from kvstore_proto.terms import Terms
from kvstore_proto.v1 import admin_pb2 as admin
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.admin.drop import OperatorDrop
from kvstored.clients.sessions import ClientSession
from kvstored.clock import NS_PER_S
from kvstored.lifecycle import Cause
from kvstored.rpc.verbs.put import PutVerb
from kvstored.store.blocks.check import check
from kvstored.store.operations.durability import DurabilityMode
from kvstored.store.operations.records import GetRequest, StoreStatus
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import SLOT_BYTES, small_store

POLICIES = Path(__file__).parents[3] / "docs" / "policies.md"
SMALL = ("host.capacity=4MiB", "host.policy=lru", "nvme.admission=second-touch")
SLOTS = (4 << 20) // SLOT_BYTES  # in DRAM
BEFORE = SLOTS // 2
NONE = pb.DURABILITY_MODE_NONE
ANY = {"pinned": ("no", "yes"), "leased": ("no", "yes"), "priority": ("below 0", "0", "above 0")}
PRIORITIES = {"below 0": -3, "0": 0, "above 0": 5}


def table_of_docs() -> list[dict[str, str]]:
    """The rows of the decision table, with "any" written out."""
    lines = re.search(r"^\| expired \|.*?(?=\n\n)", POLICIES.read_text(), re.M | re.S)
    assert lines is not None
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[0].splitlines()]
    found = []
    for row in rows:
        named = dict(zip(head, row, strict=True))
        wide = [ANY[name] if named[name] == "any" else (named[name],) for name in ANY]
        found += [named | dict(zip(ANY, chosen, strict=True)) for chosen in product(*wide)]
    return found


ROWS = table_of_docs()


def test_the_table_says_of_every_case_what_happens_once() -> None:
    cases = [(row["expired"], row["pinned"], row["leased"], row["priority"]) for row in ROWS]
    assert sorted(cases) == sorted(product(("no", "yes"), *ANY.values()))


@asynccontextmanager
async def driven_store(tmp_path: Path, *settings: str) -> AsyncIterator[DrivenStore]:
    async with small_store(tmp_path, *settings) as small:
        driven = DrivenStore(small)
        yield driven
        small.store.leases.release_session(driven.client.session_id)
        await small.settle()
        assert check(small.residency) == []


def over_a_store(*settings: str) -> Callable[[Callable[[DrivenStore], Awaitable[None]]], Callable[[Path], None]]:
    def decorate(scenario: Callable[[DrivenStore], Awaitable[None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                async with driven_store(tmp_path, *settings) as driven:
                    await scenario(driven)

            asyncio.run(main())

        run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
        return run

    return decorate


async def put(driven: DrivenStore, chain: int, blocks: int = 1, **terms: Any) -> list[bytes]:
    keys = keys_of(chain, blocks)
    driven.small.clock.advance(s=0.001)
    (*_, last) = await driven.put(keys, DurabilityMode.NONE, terms=Terms(**terms))
    assert set(last.statuses) <= {StoreStatus.STORED, StoreStatus.PRESENT}
    return keys


def usable(driven: DrivenStore, keys: list[bytes]) -> int:
    return driven.operations.look_up.look_up(driven.client, b"".join(keys)).usable


def why(driven: DrivenStore, keys: list[bytes]) -> Cause | None:
    return driven.operations.look_up.look_up(driven.client, b"".join(keys)).cause


async def turns_until_it_leaves(driven: DrivenStore, key: bytes) -> int | None:
    """Return how many blocks leave full DRAM before this one; None: it never does."""
    small, left = driven.small, 0
    tenant = driven.client.tenant_id
    while (slot := await small.store.room.allocate(SLOT_BYTES, tenant, is_patient=False)) is not None:
        del slot  # it stays taken
        row = small.residency.find(tenant, key)
        if row < 0 or not small.residency.has(row, small.mapped):
            return left
        left += 1
    return None


@pytest.mark.parametrize("row", ROWS, ids=[" ".join(list(row.values())[:4]) for row in ROWS])
def test_a_row_of_the_table(row: dict[str, str], tmp_path: Path) -> None:
    @over_a_store(*SMALL)
    async def scenario(driven: DrivenStore) -> None:
        small, tenant = driven.small, driven.client.tenant_id
        await put(driven, 100, BEFORE)
        pin = "owner" if row["pinned"] == "yes" else ""
        ttl_s = 2 if row["expired"] == "yes" else None
        keys = await put(driven, 1, ttl_s=ttl_s, priority=PRIORITIES[row["priority"]], pin=pin)
        await put(driven, 101, SLOTS - BEFORE - 1)
        lease = None
        if row["leased"] == "yes":
            held = driven.operations.get.acquire_mapped(driven.client, GetRequest(keys[0]))
            assert held is not None
            lease = held.run
        small.clock.advance(s=2)
        assert usable(driven, keys) == (row["found by a get"] == "yes")
        if row["expired"] == "yes":
            assert why(driven, keys) is Cause.EXPIRED
            assert small.residency.find(tenant, keys[0]) >= 0, "not removed yet"
            small.store.retention.tick()
            assert row["removed"].startswith("at once") and small.residency.find(tenant, keys[0]) < 0
            assert why(driven, keys) is Cause.EXPIRED
            assert small.store.leases.limbo_bytes() == (SLOT_BYTES if lease is not None else 0)
            if lease is not None:
                assert row["removed"].endswith("its bytes when the lease ends")
                driven.operations.get.release(driven.client, [lease.lease_id])
                assert small.store.leases.limbo_bytes() == 0
            assert small.store.host.statistics().blocks == SLOTS - 1
            return
        small.store.retention.tick()
        assert row["removed"] == "no" and small.residency.find(tenant, keys[0]) >= 0
        turn = await turns_until_it_leaves(driven, keys[0])
        expected = {"first": 0, "in the policy's order": BEFORE, "last": SLOTS - 1, "never": None}
        assert turn == expected[row["leaves a full tier"]]

    scenario(tmp_path)


def lives(driven: DrivenStore, keys: list[bytes]) -> list[int]:
    """Return for how many seconds each block still lives; 0: for ever."""
    residency, now_s = driven.small.residency, driven.small.clock.monotonic_ns() // NS_PER_S
    rows = [residency.find(driven.client.tenant_id, key) for key in keys]
    return [residency.expires_s(row) - now_s if residency.expires_s(row) else 0 for row in rows]


@over_a_store()
async def test_no_block_expires_before_those_that_continue_it(driven: DrivenStore) -> None:
    residency, touch = driven.small.residency, driven.operations.hints.touch
    keys = await put(driven, 1, 4, ttl_s=10)
    rows = residency.find_run(driven.client.tenant_id, b"".join(keys))
    driven.small.store.retention.change(rows[2:3], Terms(ttl_s=60))
    assert lives(driven, keys) == [60, 60, 60, 10], "a touch in the middle renews what is before it"
    touch(driven.client, b"".join(keys[:2]), Terms(ttl_s=5))
    assert lives(driven, keys) == [60, 60, 60, 10], "what continues them needs them"
    touch(driven.client, b"".join(keys), Terms(ttl_s=5))
    assert lives(driven, keys) == [5, 5, 5, 5], "the whole chain goes sooner when it is asked to"
    driven.small.clock.advance(s=5)
    assert (usable(driven, keys), why(driven, keys)) == (0, Cause.EXPIRED)
    driven.small.store.retention.tick()
    assert driven.small.store.counters["orphaned_blocks"] == 0


@over_a_store()
async def test_a_prefix_lives_as_long_as_the_last_of_its_branches(driven: DrivenStore) -> None:
    touch, shared = driven.operations.hints.touch, keys_of(1, 2)
    branches = [[*shared, *keys_of(2 + branch, 2)] for branch in range(3)]
    for branch, ttl_s in zip(branches, (30, 20, None), strict=True):
        await driven.put(branch, DurabilityMode.NONE, terms=Terms(ttl_s=ttl_s))
    assert [lives(driven, branch) for branch in branches] == [[0, 0, 30, 30], [0, 0, 20, 20], [0, 0, 0, 0]]
    touch(driven.client, b"".join(branches[2]), Terms(ttl_s=7))
    assert lives(driven, branches[2]) == [30, 30, 7, 7]
    driven.small.clock.advance(s=20)
    driven.small.store.retention.tick()
    assert [usable(driven, branch) for branch in branches] == [4, 2, 2]
    await driven.put([*shared, *keys_of(2, 2), *keys_of(9, 1)], DurabilityMode.NONE)
    assert lives(driven, branches[0]) == [0, 0, 0, 0], "a block that never expires needs all that are before it"


@over_a_store()
async def test_a_touch_looks_for_branches_in_slices(driven: DrivenStore) -> None:
    """Chains are stored, touched and stored again while the looks for what touches have shortened go on. No block ever
    expires before one that continues it; in the end each lives as long as its last touch, or its branches, say."""
    retention, residency, rng = driven.small.store.retention, driven.small.residency, random.Random(7)
    retention.shortening.part_rows = 7
    prefix = [keys_of(each, 1)[0] for each in range(3)]
    chains = [[*prefix[: 1 + number % 3], *keys_of(100 + number, 2)] for number in range(24)]
    wanted: dict[bytes, int] = {}
    for chain in chains:
        await driven.put(chain, DurabilityMode.NONE, terms=Terms(ttl_s=1000))
        wanted |= dict.fromkeys(chain, 1000)
    for turn in range(300):
        chain = rng.choice(chains)
        if turn % 10:
            ttl_s = rng.randrange(10, 1000)
            driven.operations.hints.touch(driven.client, b"".join(chain), Terms(ttl_s=ttl_s))
            wanted |= dict.fromkeys(chain, ttl_s)
        else:  # a block in the middle is lost, and stored again for a short time
            row = residency.find(driven.client.tenant_id, chain[0])
            for taken in residency.remove(row, Cause.DROPPED, driven.small.clock.monotonic_ns()):
                driven.small.store.discard[taken.tier](taken.slot, driven.client.tenant_id)
            await driven.put(chain[:1], DurabilityMode.NONE, terms=Terms(ttl_s=5))
            wanted[chain[0]] = 5
        if rng.random() < 0.5:
            retention.tick()
        for each in chains:
            now = [second or 1 << 40 for second in lives(driven, each)]
            assert now == sorted(now, reverse=True), "a parent outlives its child"
    while retention.tick():
        pass
    for chain in chains:
        below = [[key for other in chains if each in other for key in other[other.index(each) :]] for each in chain]
        needs = [max(wanted[key] for key in keys) for keys in below]
        assert lives(driven, chain) == needs


@over_a_store()
async def test_a_block_that_is_stored_again_lives_as_long_as_what_hung_on_it(driven: DrivenStore) -> None:
    residency, retention = driven.small.residency, driven.small.store.retention
    keys = await put(driven, 1, 3, ttl_s=50)
    row = residency.find(driven.client.tenant_id, keys[1])
    for taken in residency.remove(row, Cause.DROPPED, driven.small.clock.monotonic_ns()):
        driven.small.store.discard[taken.tier](taken.slot, driven.client.tenant_id)
    retention.change((residency.find(driven.client.tenant_id, keys[0]),), Terms(ttl_s=3))
    await driven.put(keys, DurabilityMode.NONE, terms=Terms(ttl_s=4))
    assert lives(driven, keys) == [50, 50, 50]


@over_a_store()
async def test_what_has_expired_by_its_header_waits_for_terms_that_are_not_read_yet(driven: DrivenStore) -> None:
    """A touch may have let it live; only the saved terms, which could not be read, say so."""
    retention = driven.small.store.retention
    keys = await put(driven, 1, 2, ttl_s=2)
    retention.later.is_pending = True
    driven.small.clock.advance(s=2)
    retention.tick()
    assert usable(driven, keys) == 0 and driven.small.residency.find(driven.client.tenant_id, keys[0]) >= 0
    retention.later.is_pending = False
    retention.tick()
    assert driven.small.residency.find(driven.client.tenant_id, keys[0]) < 0


@over_a_store(*SMALL)
async def test_the_pins_of_an_owner_end_together_at_their_time(driven: DrivenStore) -> None:
    residency, retention = driven.small.residency, driven.small.store.retention
    first, second = await put(driven, 1, pin="a", pin_ttl_s=100), await put(driven, 2, pin="b")
    await put(driven, 3, pin="a", pin_ttl_s=9)
    await put(driven, 2, pin="a")
    rows = [residency.find(driven.client.tenant_id, keys[0]) for keys in (first, second)]
    driven.small.clock.advance(s=8)
    retention.tick()
    assert [retention.pins.names(row) for row in rows] == [["a"], ["a", "b"]]
    driven.small.clock.advance(s=1)
    retention.tick()
    assert [retention.pins.names(row) for row in rows] == [[], ["b"]]
    assert usable(driven, first) == 1, "the block stays"
    await put(driven, 1, pin="a")
    driven.small.clock.advance(s=1000)
    retention.tick()
    assert retention.pins.names(rows[0]) == ["a"], "a new pin has no end of the last one"


@over_a_store("limits.pinned_per_owner=32KiB")
async def test_an_owner_pins_no_more_than_its_own_bound(driven: DrivenStore) -> None:
    hints, keys = driven.operations.hints, await put(driven, 1, 32768 // SLOT_BYTES, pin="a")
    more = await put(driven, 2, pin="b")
    with pytest.raises(KVStoreError, match=r"owner 'a' has pinned 32\.0 KiB.*limits\.pinned_per_owner.*unpin some"):
        hints.touch(driven.client, more[0], Terms(pin="a"))
    assert hints.touch(driven.client, b"".join(keys), Terms(pin="a")) == len(keys), "these are pinned already"
    hints.touch(driven.client, keys[-1], Terms(unpin="a"))
    assert hints.touch(driven.client, more[0], Terms(pin="a")) == 1


@over_a_store()
async def test_an_expired_block_can_be_put_again_before_it_was_removed(driven: DrivenStore) -> None:
    keys = await put(driven, 1, 2, ttl_s=1)
    driven.small.clock.advance(s=1)
    (*_, last) = await driven.put(keys, DurabilityMode.NONE, terms=Terms(ttl_s=100))
    assert list(last.statuses) == [StoreStatus.STORED] * 2
    assert usable(driven, keys) == 2
    driven.small.clock.advance(s=50)
    driven.small.store.retention.tick()
    assert usable(driven, keys) == 2


@over_a_store()
async def test_a_put_of_what_is_there_keeps_it_longer_never_shorter(driven: DrivenStore) -> None:
    residency = driven.small.residency
    keys = await put(driven, 1, ttl_s=100, priority=2)
    row = residency.find(driven.client.tenant_id, keys[0])
    at_first_s = residency.expires_s(row)
    await put(driven, 1, ttl_s=10, priority=-1, pin="a")
    assert (residency.expires_s(row), residency.priority(row)) == (at_first_s, 2)
    await put(driven, 1, ttl_s=200, priority=3, pin="b")
    assert (residency.expires_s(row), residency.priority(row)) == (at_first_s + 100, 3)
    assert driven.small.store.retention.pins.names(row) == ["a", "b"]
    await put(driven, 1, ttl_s=0)
    assert residency.expires_s(row) == 0
    await put(driven, 1, ttl_s=10)
    assert residency.expires_s(row) == 0, "for ever is longer"


@over_a_store()
async def test_a_touch_sets_what_it_says_and_unpins_by_owner(driven: DrivenStore) -> None:
    residency, hints = driven.small.residency, driven.operations.hints
    keys = await put(driven, 1, 2, pin="a")
    packed = b"".join(keys)
    rows = residency.find_run(driven.client.tenant_id, packed)
    assert hints.touch(driven.client, packed, Terms(ttl_s=9, priority=-8, pin="b")) == 2
    assert {residency.priority(row) for row in rows} == {-8}
    assert all(residency.expires_s(row) for row in rows)
    assert residency.pin_count(rows[0]) == 1, "two owners, one pin"
    hints.touch(driven.client, packed, Terms(unpin="a"))
    assert driven.small.store.retention.pins.names(rows[1]) == ["b"]
    hints.touch(driven.client, packed, Terms(ttl_s=0, priority=0, unpin="b"))
    assert residency.pinned_bytes[driven.client.tenant_id] == 0
    assert {residency.pin_count(row) for row in rows} == {0}
    assert {residency.expires_s(row) for row in rows} == {0}


@over_a_store("limits.pinned_per_tenant=64KiB")
async def test_pins_are_bounded_in_bytes_and_owners(driven: DrivenStore) -> None:
    retention, tenant = driven.small.store.retention, driven.client.tenant_id
    keys = await put(driven, 1, 2, pin="a")
    with pytest.raises(KVStoreError, match=r"limits\.pinned_per_tenant"):
        retention.check(tenant, Terms(pin="a"), 64 << 10)
    for number in range(31):
        await put(driven, 1, 2, pin=f"owner {number}")
    with pytest.raises(KVStoreError, match="32 owners"):
        retention.check(tenant, Terms(pin="one more"), 0)
    driven.operations.hints.touch(driven.client, b"".join(keys), Terms(unpin="owner 7"))
    retention.check(tenant, Terms(pin="one more"), 0)


@pytest.mark.parametrize(
    ("terms", "what"),
    [
        (Terms(ttl_s=1 << 31), "ttl must be from 1 to"),
        (Terms(priority=8), "priority must be from -8 to 7, got 8"),
        (Terms(pin="x" * 65), "pin must name an owner in up to 64"),
        (Terms(unpin="\n"), "unpin must name an owner"),
        (Terms(pin_ttl_s=9), "pin_ttl goes with pin"),
    ],
)
def test_wrong_terms_are_refused_in_one_line(terms: Terms, what: str, tmp_path: Path) -> None:
    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        with pytest.raises(KVStoreError, match=what):
            driven.small.store.retention.check(0, terms, 0)

    scenario(tmp_path)


@over_a_store()
async def test_a_tenants_defaults_are_of_new_blocks(driven: DrivenStore) -> None:
    residency, retention = driven.small.residency, driven.small.store.retention
    before = await put(driven, 1)
    retention.defaults[driven.client.tenant_id] = Terms(ttl_s=60, priority=-2)
    plain, told = await put(driven, 2), await put(driven, 3, ttl_s=0, priority=1)
    await put(driven, 1)
    found = [residency.find(driven.client.tenant_id, keys[0]) for keys in (before, plain, told)]
    assert [residency.priority(row) for row in found] == [0, -2, 1]
    assert [residency.expires_s(row) > 0 for row in found] == [False, True, False]


@over_a_store(*SMALL, "host.ttl_s=10")
async def test_idle_copies_leave_whatever_the_policy_tail_first(driven: DrivenStore) -> None:
    small = driven.small
    idle, used = await put(driven, 1, 3), await put(driven, 2, 3)
    held = driven.operations.get.acquire_mapped(driven.client, GetRequest(idle[0]))
    assert held is not None and held.run is not None
    await asyncio.sleep(0)  # the access is counted once the answer is on its way
    small.clock.advance(s=9)
    await driven.get(used)
    await asyncio.sleep(0)
    small.clock.advance(s=2)
    small.store.retention.tick()
    assert (usable(driven, idle), usable(driven, used)) == (1, 3), "leased, and used in time"
    driven.operations.get.release(driven.client, [held.run.lease_id])
    for _ in range(2):  # its look begins anew
        small.store.retention.tick()
    assert usable(driven, idle) == 0


@over_a_store(*SMALL)
async def test_priorities_follow_blocks_through_tiers_and_policies(driven: DrivenStore) -> None:
    small, tenant = driven.small, driven.client.tenant_id
    high = await put(driven, 1, 2, priority=4)
    await put(driven, 100, SLOTS - 2)
    await put(driven, 101, SLOTS - 2)
    assert driven.tiers_of(high[1]) & 1 << small.mapped, "older than all, and still in DRAM"
    small.store.replace_policy(small.config, small.mapped)
    await put(driven, 200, SLOTS - 2)
    assert driven.tiers_of(high[1]) & 1 << small.mapped
    rows = small.residency.find_run(tenant, b"".join(high))
    small.store.retention.change(rows, Terms(priority=0))
    await put(driven, 300, SLOTS - 2)
    assert not driven.tiers_of(high[1]) & 1 << small.mapped


@over_a_store("limits.pinned_per_tenant=64KiB")
async def test_an_unpin_after_owners_were_forgotten_pins_for_nobody(driven: DrivenStore) -> None:
    hints, tenant = driven.operations.hints, driven.client.tenant_id
    keys = await put(driven, 1, 2)
    packed = b"".join(keys)
    driven.small.store.retention.pins.rows_of = MagicMock(side_effect=AssertionError("looks at all pinned blocks"))  # type: ignore[method-assign]
    for number in range(32):
        hints.touch(driven.client, packed, Terms(pin=f"owner {number}"))
        hints.touch(driven.client, packed, Terms(unpin=f"owner {number}"))
    hints.touch(driven.client, packed, Terms(pin="one more"))
    hints.touch(driven.client, packed, Terms(unpin="one more"))
    assert driven.small.residency.pinned_bytes[tenant] == 0
    assert {driven.small.residency.pin_count(row) for row in driven.small.residency.find_run(tenant, packed)} == {0}


@over_a_store("limits.pinned_per_tenant=64KiB")
async def test_blocks_that_are_pinned_count_once_against_the_bound(driven: DrivenStore) -> None:
    hints, tenant = driven.operations.hints, driven.client.tenant_id
    keys = await put(driven, 1, 4, pin="a")
    assert 2 * driven.small.residency.pinned_bytes[tenant] > 64 << 10
    assert hints.touch(driven.client, b"".join(keys), Terms(pin="b")) == 4
    verb, client = PutVerb(driven.operations.put, driven.small.store), cast(ClientSession, driven.client)
    again = verb.store_inline(client, driven.offer(keys, Terms(pin="c")), NONE)
    statuses = [list(answer.store.statuses) async for answer in again]
    assert statuses == [[StoreStatus.PRESENT] * 4]
    with pytest.raises(KVStoreError, match=r"limits\.pinned_per_tenant"):
        verb.store_inline(client, driven.offer(keys_of(2, 1), Terms(pin="a")), NONE)


@over_a_store("limits.pinned_per_tenant=64KiB")
async def test_pins_of_puts_under_way_count_against_the_bound(driven: DrivenStore) -> None:
    verb, client = PutVerb(driven.operations.put, driven.small.store), cast(ClientSession, driven.client)
    answers = verb.store_inline(client, driven.offer(keys_of(1, 4), Terms(pin="a")), NONE)
    with pytest.raises(KVStoreError, match=r"limits\.pinned_per_tenant"):
        verb.store_inline(client, driven.offer(keys_of(2, 1), Terms(pin="a")), NONE)
    assert [list(answer.store.statuses) async for answer in answers] == [[StoreStatus.STORED] * 4]
    driven.operations.hints.touch(driven.client, b"".join(keys_of(1, 4)), Terms(unpin="a"))
    await put(driven, 2, 4, pin="a")


@over_a_store(*SMALL)
async def test_a_pinned_block_moves_when_its_arena_is_emptied(driven: DrivenStore) -> None:
    """A pin says that the block is not evicted; a few pins must not hold every arena to one size of slots."""
    residency, tenant = driven.small.residency, driven.client.tenant_id
    keys = await put(driven, 1, pin="a")
    await put(driven, 100, SLOTS // 2)
    row = residency.find(tenant, keys[0])
    before = residency.slot(row, driven.small.mapped)
    assert await driven.small.store.room.vacate(before.container)
    after = residency.slot(row, driven.small.mapped)
    assert after.container != before.container and residency.pin_count(row) == 1
    assert (await driven.get(keys)).blocks == 1


@over_a_store("limits.pinned_per_tenant=64KiB")
async def test_a_put_under_way_keeps_the_owner_that_it_will_pin_for(driven: DrivenStore) -> None:
    """The last owner that fits is asked for by a put; another one must not get its bit before the put has ended."""
    hints, retention, tenant = driven.operations.hints, driven.small.store.retention, driven.client.tenant_id
    keys = await put(driven, 1)
    for number in range(31):
        hints.touch(driven.client, keys[0], Terms(pin=f"owner {number}"))
    verb, client = PutVerb(driven.operations.put, driven.small.store), cast(ClientSession, driven.client)
    answers = verb.store_inline(client, driven.offer(keys_of(2, 1), Terms(pin="of the put")), NONE)
    with pytest.raises(KVStoreError, match="32 owners"):
        hints.touch(driven.client, keys[0], Terms(pin="one more"))
    assert [list(answer.store.statuses) async for answer in answers] == [[StoreStatus.STORED]]
    assert retention.pins.names(driven.small.residency.find(tenant, keys_of(2, 1)[0])) == ["of the put"]
    hints.touch(driven.client, keys_of(2, 1)[0], Terms(unpin="of the put"))
    hints.touch(driven.client, keys[0], Terms(pin="one more"))
    assert "one more" in retention.pins.names(driven.small.residency.find(tenant, keys[0]))


@over_a_store("host.capacity=4MiB", "limits.pinned_per_tenant=1GiB")
async def test_the_bound_on_pins_follows_a_resize_of_dram(driven: DrivenStore) -> None:
    host, retention, tenant = driven.small.store.host, driven.small.store.retention, driven.client.tenant_id
    three = Terms(pin="a"), 3 << 20
    with pytest.raises(KVStoreError, match=r"half of DRAM, 2\.0 MiB"):
        retention.check(tenant, *three)
    host.resize(8 << 20)
    retention.check(tenant, *three)
    host.set_ceiling(5 << 20)  # as at the begin of a resize to less
    with pytest.raises(KVStoreError, match=r"half of DRAM, 2\.5 MiB"):
        retention.check(tenant, *three)


@over_a_store()
async def test_an_operator_ends_the_pins_of_one_owner_or_of_all(driven: DrivenStore) -> None:
    """The tenant needs no client."""
    directory: Any = SimpleNamespace(number=lambda name, residency: {"tenant": driven.client.tenant_id}.get(name))
    drop, owners = OperatorDrop(driven.small.store, directory), driven.small.store.retention.pins.names
    first, second = await put(driven, 1, pin="a"), await put(driven, 2, pin="b")
    await put(driven, 1, pin="b")
    rows = [driven.small.residency.find(driven.client.tenant_id, keys[0]) for keys in (first, second)]
    with pytest.raises(KVStoreError, match="name the tenant"):
        await drop.drop(admin.DropRequest(pins=True, owner="a"))
    assert (await drop.drop(admin.DropRequest(pins=True, tenant="tenant", owner="c"))).unpinned_blocks == 0
    assert (await drop.drop(admin.DropRequest(pins=True, tenant="tenant", owner="a"))).unpinned_blocks == 1
    assert [owners(row) for row in rows] == [["b"], ["b"]]
    assert (await drop.drop(admin.DropRequest(pins=True, tenant="tenant"))).unpinned_blocks == 2
    assert [driven.small.residency.pin_count(row) for row in rows] == [0, 0]
