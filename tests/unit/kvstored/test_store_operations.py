"""The store without a socket or a wire message: put, lookup, get, hints and delete on plain records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from kvstore_proto.identity import KEY_BYTES
from kvstore_proto.terms import Terms
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_tiers.testing.faulty import Fault
from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.blocks.check import check
from kvstored.store.operations.delete import Fate
from kvstored.store.operations.durability import Durability, DurabilityMode
from kvstored.store.operations.records import Acquired, GetRequest, GrantedRun, StoreStatus
from kvstored.store.policies.base import Share
from kvstored.store.policies.chain_hazard import ChainHazard
from tests.reference.driven_store import DrivenStore, keys_of
from tests.reference.small_store import PAYLOAD_BYTES, small_store
from tests.reference.tiers import HOST, NVME

BLOCKS = 5
KEYS = keys_of(1, BLOCKS)
PACKED = b"".join(KEYS)
OTHERS = keys_of(2, BLOCKS)
ON_BOTH = 1 << HOST | 1 << NVME


def positions_of(runs: Sequence[GrantedRun]) -> list[int]:
    return sorted(at for run in runs for at in range(run.first, run.first + len(run.rows)))


def over_a_store(
    *settings: str,
) -> Callable[[Callable[[DrivenStore], Coroutine[None, None, None]]], Callable[[Path], None]]:
    def decorate(scenario: Callable[[DrivenStore], Coroutine[None, None, None]]) -> Callable[[Path], None]:
        def run(tmp_path: Path) -> None:
            async def main() -> None:
                async with small_store(tmp_path, *settings) as small:
                    driven = DrivenStore(small)
                    await scenario(driven)
                    small.store.leases.release_session(driven.client.session_id)
                    await small.until(lambda: not small.residency.pins)
                    assert check(small.residency) == []

            asyncio.run(main())

        run.__name__, run.__doc__ = scenario.__name__, scenario.__doc__
        return run

    return decorate


@over_a_store()
async def test_what_is_put_is_found_got_and_deleted(driven: DrivenStore) -> None:
    first, last = await driven.put(KEYS, DurabilityMode.BATCH)
    assert list(first.statuses) == [StoreStatus.STORED] * BLOCKS
    assert (first.final, last.final) == (False, True)
    assert set(last.durability) <= {Durability.DURABLE, Durability.VOLATILE}
    found = driven.operations.look_up.look_up(driven.client, PACKED + b"?" * KEY_BYTES)
    assert (found.usable, found.cause) == (BLOCKS, Cause.NEVER_STORED)
    held = driven.operations.get.acquire_mapped(driven.client, GetRequest(PACKED))
    assert held is not None and held.run is not None and (held.blocks, held.cause) == (BLOCKS, None)
    assert (await driven.get(KEYS)).blocks == BLOCKS, "as they were put"
    in_use = await driven.operations.delete.delete(driven.client, KEYS)
    assert in_use.fates[-1] is Fate.IN_USE
    assert driven.operations.get.release(driven.client, [held.run.lease_id]) == 1
    deleted = await driven.operations.delete.delete(driven.client, KEYS)
    assert deleted.fates == [Fate.DELETED] * BLOCKS and deleted.nbytes == BLOCKS * PAYLOAD_BYTES


@over_a_store()
async def test_another_tenant_finds_nothing_and_releases_nothing(driven: DrivenStore) -> None:
    await driven.put(KEYS, DurabilityMode.NONE)
    held = driven.operations.get.acquire_mapped(driven.client, GetRequest(PACKED))
    assert held is not None and held.run is not None
    stranger = driven.new_client(2, "another")
    assert driven.operations.look_up.look_up(stranger, PACKED).usable == 0
    nothing = await driven.operations.get.acquire(stranger, GetRequest(PACKED))
    assert (nothing.blocks, nothing.run, nothing.cause) == (0, None, Cause.NEVER_STORED)
    assert driven.operations.get.release(stranger, [held.run.lease_id]) == 0


@pytest.mark.parametrize("why", ["no_room", "over_quota", "declined"])
def test_a_put_that_is_refused_says_why_and_so_does_a_later_miss(tmp_path: Path, why: str) -> None:
    """DRAM for a few blocks, all of them leased or kept."""

    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        store, tenant = driven.small.store, driven.client.tenant_id
        driven.small.disk.plan(Fault("write", "fail"))
        filled = keys_of(9, 2 * store.config.host.capacity_bytes // PAYLOAD_BYTES)
        held = [status for answer in await driven.put(filled, DurabilityMode.NONE) for status in answer.statuses]
        stored = held.count(StoreStatus.STORED)
        assert 0 < stored < len(filled) and set(held[stored:]) == {StoreStatus.NO_ROOM}, "a chain keeps its own head"
        before = store.counters.snapshot()
        if why == "declined":
            store.policies[HOST].declines = lambda *_: True  # type: ignore[method-assign]
        else:
            lease = driven.operations.get.acquire_mapped(driven.client, GetRequest(b"".join(filled[:stored])))
            assert lease is not None and lease.blocks == stored
        if why == "over_quota":
            store.policies[HOST].set_share(tenant, Share(max_bytes=PAYLOAD_BYTES))
        (answer,) = await driven.put(KEYS, DurabilityMode.NONE)
        assert list(answer.statuses) == [StoreStatus[why.upper()]] * BLOCKS
        found = driven.operations.look_up.look_up(driven.client, PACKED)
        assert (found.usable, found.cause) == (0, Cause[why.upper()])
        counted = {name: count - before[name] for name, count in store.counters.snapshot().items()}
        refused = {
            name: counted[f"{name}_blocks"] for name in ("no_room", "over_quota", "declined", "stored", "evicted")
        }
        assert refused == {**dict.fromkeys(refused, 0), why: BLOCKS}

    scenario(tmp_path)


@pytest.mark.parametrize(
    ("terms", "status"),
    [
        (Terms(priority=1), StoreStatus.STORED),
        (Terms(pin="nightly"), StoreStatus.STORED),
        (Terms(priority=-1), StoreStatus.DECLINED),
        (Terms(ttl_s=9), StoreStatus.DECLINED),
    ],
)
def test_a_policy_declines_no_block_whose_terms_precede_its_order(
    tmp_path: Path, terms: Terms, status: StoreStatus
) -> None:
    @over_a_store()
    async def scenario(driven: DrivenStore) -> None:
        store = driven.small.store
        driven.small.disk.plan(Fault("write", "fail"))
        filled = keys_of(9, 2 * store.config.host.capacity_bytes // PAYLOAD_BYTES)
        await driven.put(filled, DurabilityMode.NONE)
        store.policies[HOST].declines = lambda *_: True  # type: ignore[method-assign]
        (answer,) = await driven.put(KEYS, DurabilityMode.NONE, terms=terms)
        assert list(answer.statuses) == [status] * BLOCKS
        driven.operations.hints.touch(driven.client, PACKED, Terms(unpin=terms.pin))

    scenario(tmp_path)


@pytest.mark.parametrize("from_back", [False, True])
def test_blocks_below_come_in_the_order_that_is_asked_for(tmp_path: Path, from_back: bool) -> None:
    @over_a_store("movement.in_flight=1")
    async def scenario(driven: DrivenStore) -> None:
        await driven.put_on_nvme_alone(KEYS)
        expected, runs, end = await driven.stream(GetRequest(PACKED, from_back=from_back))
        assert list(expected.tiers) == [NVME] * BLOCKS and sorted(expected.ready_us) == list(expected.ready_us)
        order = [run.first for run in runs]
        assert order == sorted(order, reverse=from_back) and len(order) > 1
        assert sum(run.promoted[NVME] for run in runs) == BLOCKS == end.blocks
        assert positions_of(runs) == list(range(BLOCKS)) and (await driven.get(KEYS)).blocks == BLOCKS

    scenario(tmp_path)


@over_a_store()
async def test_blocks_that_the_engine_holds_are_counted_and_not_loaded(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    _, runs, end = await driven.stream(GetRequest(PACKED), held=2)
    assert positions_of(runs) == [2, 3, 4]
    assert end.blocks == BLOCKS
    row = driven.small.residency.find(driven.client.tenant_id, KEYS[0])
    assert not driven.small.residency.has(row, HOST) and driven.small.residency.rows.accesses[row] >= 2


@over_a_store("movement.in_flight=1")
async def test_a_stream_that_its_caller_leaves_gives_everything_back(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    answers, run = await driven.begin_stream(GetRequest(PACKED))
    lane = driven.small.store.mover.lanes["nvme→host"]
    left = sum(lane.statistics(0).queued + lane.statistics(0).in_flight)
    assert 1 < left < BLOCKS, "the first block has come, and perhaps another one since"
    await answers.aclose()
    assert sum(lane.statistics(0).queued + lane.statistics(0).in_flight) == 1, (
        "what was queued is not read; the read under way ends"
    )
    assert driven.operations.get.release(driven.client, [run.lease_id]) == 1
    await driven.small.settle()
    assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * (BLOCKS - left + 1) + [1 << NVME] * (left - 1)
    assert (await driven.get(KEYS)).blocks == BLOCKS


@over_a_store("movement.in_flight=1", "movement.acquire_wait_ms=60000")
async def test_a_lease_of_a_stream_expires_counted_from_its_beginning(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    answers, first = await driven.begin_stream(GetRequest(PACKED))
    driven.small.clock.advance(s=3)
    second = await anext(answers)
    assert isinstance(second, GrantedRun)
    ttl_ms = driven.operations.get.lease_ttl_ms
    assert (first.expires_in_ms, second.expires_in_ms) == (ttl_ms, ttl_ms + 3000)
    await answers.aclose()
    await driven.small.settle()


def notes_of_uses(driven: DrivenStore) -> list[tuple[list[int], list[bytes]]]:
    """The rows, and missing keys, of each request of which DRAM's policy is notified from now on."""
    policy, noted = driven.small.store.policies[HOST], list[tuple[list[int], list[bytes]]]()
    requested = policy.requested

    def note(rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
        noted.append((list(rows), list(missing)))
        requested(rows, missing, tenant, now_ns)

    policy.requested = note  # type: ignore[method-assign]
    policy.accessed = lambda rows, now_ns: note(rows, (), driven.client.tenant_id, now_ns)  # type: ignore[method-assign]
    return noted


@over_a_store("movement.in_flight=1")
async def test_a_policy_is_notified_of_a_get_in_order_when_its_blocks_are_mapped(driven: DrivenStore) -> None:
    """Else the policy of DRAM would take it for a request of the blocks that were there before."""
    await driven.put(KEYS, DurabilityMode.ALWAYS)
    driven.leave_host(KEYS[2:])
    rows = driven.small.residency.find_keys(driven.client.tenant_id, KEYS)
    uses = notes_of_uses(driven)
    await driven.stream(GetRequest(PACKED, from_back=True))
    assert uses == [(rows, [])]

    driven.leave_host(KEYS[1:])
    leaving, first = await driven.begin_stream(GetRequest(PACKED))
    assert len(uses) == 1
    await leaving.aclose()  # the engine has computed the rest
    mapped = [row for row in rows if driven.small.residency.has(row, HOST)]
    assert uses[1:] == [(mapped, [])] and len(mapped) < BLOCKS
    driven.operations.get.release(driven.client, [first.lease_id])

    await driven.stream(GetRequest(b"".join(OTHERS)))
    assert uses[2:] == [([], OTHERS)], "a request that found nothing"


@over_a_store("movement.in_flight=1")
async def test_a_look_at_what_is_mapped_and_the_get_that_follows_are_one_request_to_policies(
    driven: DrivenStore,
) -> None:
    await driven.put(KEYS, DurabilityMode.ALWAYS)
    driven.leave_host(KEYS[2:])
    rows = driven.small.residency.find_keys(driven.client.tenant_id, KEYS)
    uses = notes_of_uses(driven)
    seen = driven.operations.get.acquire_mapped(driven.client, GetRequest(PACKED, mapped_only=True))
    assert seen is not None and seen.blocks == 2
    await asyncio.sleep(0)
    await driven.stream(GetRequest(PACKED))
    assert uses == [(rows, [])]
    driven.operations.get.acquire_mapped(driven.client, GetRequest(PACKED, mapped_only=True))
    await asyncio.sleep(0)
    assert uses[1:] == [(rows, [])], "nothing follows where all is mapped"


@over_a_store("movement.in_flight=1")
async def test_what_goes_while_it_is_loaded_ends_the_chain_that_policies_are_notified_of(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    rows = driven.small.residency.find_keys(driven.client.tenant_id, KEYS)
    uses = notes_of_uses(driven)
    leaving, first = await driven.begin_stream(GetRequest(PACKED))
    driven.operations.get.release(driven.client, [first.lease_id])
    await driven.operations.delete.delete(driven.client, KEYS[3:])
    await leaving.aclose()
    assert len(uses) == 1 and set(uses[0][0]) <= set(rows[:3])
    await driven.small.settle()


@pytest.mark.parametrize("gone", [3, 4])
def test_what_goes_while_an_answer_is_on_its_way_is_not_leased(tmp_path: Path, gone: int) -> None:
    """Two runs are readable at once; the client takes the first, and the second loses its end meanwhile."""

    @over_a_store("movement.in_flight=1")
    async def scenario(driven: DrivenStore) -> None:
        await driven.put(KEYS, DurabilityMode.ALWAYS)
        driven.leave_host(KEYS[2:3])
        answers, first = await driven.begin_stream(GetRequest(PACKED))
        assert list(first.rows) == driven.small.residency.find_keys(driven.client.tenant_id, KEYS[:2])
        for key in reversed(KEYS[gone:]):  # their time is over
            assert driven.small.store.retention.end(driven.small.residency.find(driven.client.tenant_id, key))
        *runs, end = [answer async for answer in answers]
        leased = [run for run in (first, *runs) if isinstance(run, GrantedRun)]
        assert positions_of(leased) == list(range(gone)) and all(len(run.rows) == len(run.slots) for run in leased)
        assert isinstance(end, Acquired) and (end.blocks, end.cause) == (gone, Cause.EXPIRED)
        assert driven.operations.get.release(driven.client, [run.lease_id for run in leased]) == len(leased)

    scenario(tmp_path)


@over_a_store(f"host.policy={CHAIN_HAZARD}")
async def test_a_get_that_is_loaded_whole_is_a_request_and_not_the_end_of_the_put_before(driven: DrivenStore) -> None:
    policy = driven.small.store.policies[HOST]
    assert isinstance(policy, ChainHazard)
    await driven.get(KEYS)
    await asyncio.sleep(0)  # policies are notified behind the answer
    await driven.put(KEYS, DurabilityMode.ALWAYS)
    for number in range(1, 3):
        driven.leave_host(KEYS)
        driven.small.clock.advance(s=10.0)
        await driven.stream(GetRequest(PACKED))
        await asyncio.sleep(0)  # it learns in a turn of its own
        assert policy.follower.book.learning.returns == number


@over_a_store("movement.in_flight=1")
async def test_what_is_asked_for_second_is_loaded_second(driven: DrivenStore) -> None:
    """The gets come as for the layer ranges of a prefix: each begins before the first of them has a block."""
    await driven.put_on_nvme_alone(KEYS)
    await driven.put_on_nvme_alone(OTHERS)
    gets = [
        driven.operations.get.acquire_in_order(driven.client, GetRequest(b"".join(keys))) for keys in (KEYS, OTHERS)
    ]
    first_us, second_us = [(await anext(get)).ready_us for get in gets]  # type: ignore[union-attr]
    assert max(first_us) < min(second_us), "and expected so"
    run = await anext(gets[1])
    assert isinstance(run, GrantedRun) and run.first == 0
    assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * BLOCKS
    assert driven.tiers_of(OTHERS[-1]) == 1 << NVME
    for get in gets:
        await get.aclose()
    await driven.small.settle()


@over_a_store("movement.in_flight=1")
async def test_a_get_with_a_nearer_deadline_is_loaded_first_and_hastens_what_it_shares(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    await driven.put_on_nvme_alone(OTHERS)
    patient = driven.operations.get.acquire_in_order(driven.client, GetRequest(b"".join(OTHERS)))
    await anext(patient)
    hurried = await driven.operations.get.acquire(driven.client, GetRequest(PACKED, max_wait_ms=500))
    assert hurried.blocks == BLOCKS
    assert driven.tiers_of(OTHERS[-1]) == 1 << NVME
    shared = await driven.operations.get.acquire(driven.client, GetRequest(b"".join(OTHERS[:4]), max_wait_ms=500))
    assert shared.blocks == 4 and driven.tiers_of(OTHERS[-1]) == 1 << NVME
    await patient.aclose()
    await driven.small.settle()


@over_a_store("movement.in_flight=1")
async def test_what_another_get_waits_for_is_read_though_the_first_has_left(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    leaving, first = await driven.begin_stream(GetRequest(PACKED))
    staying = asyncio.ensure_future(driven.get(KEYS[:3], driven.new_client(2)))
    await asyncio.sleep(0)
    await leaving.aclose()
    assert (await staying).blocks == 3
    assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * 3 + [1 << NVME] * 2
    driven.operations.get.release(driven.client, [first.lease_id])


@over_a_store("movement.in_flight=1")
async def test_a_hint_is_heeded_though_a_get_that_joined_it_has_left(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    assert driven.operations.hints.prefetch(driven.client, PACKED, budget_bytes=2**30).scheduled_blocks == BLOCKS
    leaving, first = await driven.begin_stream(GetRequest(PACKED))
    await leaving.aclose()
    driven.operations.get.release(driven.client, [first.lease_id])
    await driven.small.settle()
    assert [driven.tiers_of(key) for key in KEYS] == [ON_BOTH] * BLOCKS


@over_a_store()
async def test_a_prefetch_is_a_get_that_no_request_waits_for(driven: DrivenStore) -> None:
    await driven.put_on_nvme_alone(KEYS)
    queued = driven.operations.hints.prefetch(driven.client, PACKED, budget_bytes=3 * PAYLOAD_BYTES)
    assert (queued.resident_blocks, queued.scheduled_blocks) == (0, 3)
    held = await driven.operations.get.acquire(driven.client, GetRequest(PACKED))
    assert held.blocks == BLOCKS and held.run is not None and held.run.promoted.total() == BLOCKS


def test_the_numbers_are_those_of_the_wire() -> None:
    for ours, theirs, prefix in (
        (StoreStatus, pb.StoreStatus, "STORE_STATUS_"),
        (Durability, pb.Durability, "DURABILITY_"),
        (DurabilityMode, pb.DurabilityMode, "DURABILITY_MODE_"),
    ):
        wire = {name.removeprefix(prefix): number for name, number in theirs.items()}
        wire.pop("DEFAULT", None)  # the translation's to resolve
        assert {each.name: each.value for each in ours} == wire
    assert {cause.name: cause.value for cause in Cause}.items() <= {
        name.removeprefix("MISS_REASON_"): number for name, number in pb.MissReason.items()
    }.items()


@pytest.mark.parametrize(
    ("most", "deadline", "wait"), [(0, 0, 2000), (9000, 0, 9000), (0, 7000, 7000), (9000, 7000, 7000)]
)
def test_a_request_waits_for_the_smaller_bound_that_it_gives(most: int, deadline: int, wait: int) -> None:
    assert GetRequest(b"", most, deadline).wait_ms(2000) == wait
