"""Time to live by worth: a chain that brings less than its place costs leaves by itself, from its tail."""

from __future__ import annotations

import pytest

from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import TraceBuilder
from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.policies import ChainHint, EvictionPolicy, PolicySettings, ResidencyClass, create
from kvstored.store.policies.base import WARM_WORTH
from kvstored.store.policies.chain_hazard import ChainHazard
from tests.reference.blocks import Shelf, key
from tests.reference.policies import trust_at_once
from tests.reference.traces import sessions, trace_of

S = 1_000_000_000
LATE = 7200 * S  # by then a chain that was used at 0 is worth little


def knowing(shelf: Shelf, keep_worth: float, tier: int = 0) -> EvictionPolicy:
    """A policy that believes its tables from the first request on."""
    policy = create(CHAIN_HAZARD, shelf.residency, tier, PolicySettings(keep_worth))
    trust_at_once(policy)
    return policy


def worth(policy: EvictionPolicy, row: int, now_ns: int) -> float:
    found = policy.expected_uses_per_hour(row, now_ns)
    assert found is not None
    return found


def leave(shelf: Shelf, policy: EvictionPolicy, now_ns: int, limit: int = 64) -> list[int]:
    """All that expires at that time; removing what may not leave crashes."""
    gone: list[int] = []
    while rows := policy.below_keep_worth(now_ns, limit):
        assert len(rows) <= limit
        for row in rows:
            shelf.residency.remove(row, Cause.EXPIRED, now_ns)
        gone += rows
    return gone


def test_a_chain_leaves_tail_first_once_it_is_worth_less() -> None:
    shelf = Shelf()
    policy = knowing(shelf, WARM_WORTH)
    rows = shelf.chain(1, 2, 3)
    assert worth(policy, rows[0], 1) >= WARM_WORTH
    assert policy.below_keep_worth(1, 9) == []
    assert worth(policy, rows[0], LATE) < WARM_WORTH
    assert policy.below_keep_worth(LATE, 9) == policy.below_keep_worth(LATE, 9) == [rows[-1]], "asking changes nothing"
    assert leave(shelf, policy, LATE) == rows[::-1]
    assert len(policy) == 0
    assert shelf.residency.why_missing(0, key(3)).cause is Cause.EXPIRED


def test_it_names_no_more_than_was_asked_for_and_the_least_worth_first() -> None:
    shelf = Shelf()
    policy = knowing(shelf, 1e6)
    rows: list[int] = []
    for number in range(10):
        shelf.now_ns = number * 400 * S + 1
        rows += shelf.chain(number)
    now_ns = 3700 * S
    found = policy.below_keep_worth(now_ns, 4)
    assert policy.below_keep_worth(now_ns, 0) == []
    assert len(found) == 4
    worths = [worth(policy, row, now_ns) for row in found]
    assert worths == sorted(worths)
    assert max(worths) <= min(worth(policy, row, now_ns) for row in rows if row not in found)


def test_all_leave_though_few_are_listed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.store.policies.chains.eviction_order._LISTED", 5)
    shelf = Shelf()
    policy = knowing(shelf, WARM_WORTH)
    rows = [row for number in range(30) for row in shelf.chain(10 * number, 10 * number + 1)]
    kept = shelf.chain(999)
    shelf.residency.pin(kept[0])
    assert sorted(leave(shelf, policy, LATE, 3)) == sorted(rows)
    assert len(policy) == 1


def test_a_leased_chain_stays_until_it_is_free_and_hides_no_other() -> None:
    shelf = Shelf()
    policy = knowing(shelf, WARM_WORTH)
    leased, other = shelf.chain(1, 2), shelf.chain(11, 12)
    shelf.residency.pin(leased[-1])
    assert policy.below_keep_worth(LATE, 9) == [other[-1]]
    assert leave(shelf, policy, LATE) == other[::-1]
    shelf.residency.unpin(leased[-1])
    assert leave(shelf, policy, LATE) == leased[::-1]


def test_what_was_used_again_stays() -> None:
    shelf = Shelf()
    policy = knowing(shelf, WARM_WORTH)
    used, other = shelf.chain(1, 2), shelf.chain(11, 12)
    assert set(policy.below_keep_worth(LATE, 9)) == {used[-1], other[-1]}
    shelf.now_ns = LATE
    used = shelf.chain(1, 2, 3)
    assert leave(shelf, policy, LATE) == other[::-1]
    assert all(shelf.residency.has(row, 0) for row in used)


def test_what_an_engine_will_ask_for_stays_until_it_is_long_overdue() -> None:
    shelf = Shelf()
    policy = knowing(shelf, WARM_WORTH)
    rows = shelf.chain(1, 2)
    assert policy.below_keep_worth(LATE, 9) == [rows[-1]]
    policy.on_hint(0, rows[-1], key(2), ChainHint(due_ns=LATE + 10 * S), LATE)
    assert policy.below_keep_worth(LATE, 9) == []
    assert policy.below_keep_worth(LATE + 20 * S, 9) == []
    assert policy.below_keep_worth(LATE + 120 * S, 9) == [rows[-1]]


def test_a_shared_prefix_lives_by_the_touches_of_others() -> None:
    shelf = Shelf()
    policy = knowing(shelf, 9.0)
    for session in range(16):  # once seven different blocks have followed, the prefix belongs to no session
        shelf.now_ns = 1 + session * 20 * S
        rows = shelf.chain(1, 2, 100 + session)
    now_ns = 600 * S
    assert worth(policy, rows[-1], now_ns) < 9.0 < worth(policy, rows[0], now_ns)
    leave(shelf, policy, now_ns)
    assert [shelf.residency.find(0, key(number)) >= 0 for number in (1, 2, *range(100, 116))] == [True] * 2 + [
        False
    ] * 16
    assert leave(shelf, policy, LATE) == [rows[1], rows[0]], "no request has touched it for long"


def test_nothing_expires_by_worth_while_lru_decides() -> None:
    shelf = Shelf()
    policy = create(CHAIN_HAZARD, shelf.residency, 0, PolicySettings(1e6))
    rows = shelf.chain(1, 2)
    assert policy.expected_uses_per_hour(rows[0], LATE) is None
    assert policy.below_keep_worth(LATE, 9) == []


def test_blocks_of_no_known_chain_stay_until_they_are_used() -> None:
    shelf = Shelf()
    rows = shelf.chain(1, 2)
    policy = knowing(shelf, WARM_WORTH)
    assert policy.expected_uses_per_hour(rows[0], LATE) is None
    assert policy.below_keep_worth(LATE, 9) == []
    shelf.chain(1, 2)
    assert leave(shelf, policy, LATE + 2 * S) == rows[::-1]


def test_above_nvme_the_copy_leaves_and_the_block_stays() -> None:
    shelf = Shelf("host", "nvme")
    policy = knowing(shelf, WARM_WORTH)
    rows = shelf.chain(1, 2)
    for row in rows:
        shelf.residency.attach(row, 1, shelf.slot(), 1)
    for _ in rows:
        (row,) = policy.below_keep_worth(LATE, 9)
        shelf.residency.detach(row, 0)
    assert len(policy) == 0
    assert all(shelf.residency.has(row, 1) for row in rows)


def test_keeping_what_is_warm_leaves_nothing_cold() -> None:
    """One unit for both: `keep_worth` of 4 uses an hour is where cold begins."""
    trace = trace_of(sessions(2, 700), every_s=8.0)
    without, keeping = (Replay(trace, ReplaySettings(CHAIN_HAZARD, 10_000, keep_worth=least)) for least in (0, 4))
    for replay in (without, keeping):
        replay.run()
    now_ns = keeping.clock.monotonic_ns()
    assert without.policy.class_counts(now_ns)[ResidencyClass.COLD] > 100
    keeping._expire(now_ns + 2 * S)
    rows = [row for row in range(keeping.residency.rows.capacity) if keeping.residency.tier_mask(row)]
    assert len(rows) == len(keeping.policy) > 0
    cold = [row for row in rows if keeping.policy.residency_class(row, now_ns + 2 * S) is ResidencyClass.COLD]
    assert all(worth(keeping.policy, row, now_ns + 2 * S) >= WARM_WORTH for row in cold), "others' touches keep these"
    assert len(cold) < len(rows) / 4


def test_a_replay_gives_up_hits_for_room() -> None:
    trace = trace_of(sessions(2, 700), every_s=8.0)
    found = [Replay(trace, ReplaySettings(CHAIN_HAZARD, 10_000, keep_worth=least)).run() for least in (0, 2, 8)]
    expired = [result.evicted["expired"] for result in found]
    held = [result.held_block_s.sum() for result in found]
    hits = [result.hits.sum() for result in found]
    assert 0 == expired[0] < expired[1] <= expired[2]
    assert held[0] > 1.5 * held[1] > 1.5 * held[2]
    assert hits[0] >= hits[1] >= hits[2] > 0.5 * hits[0]


@pytest.mark.slow
def test_the_guard_does_not_hold_chosen_room_against_the_policy() -> None:
    """LRU with room for everything hits more than a policy that may hold less; that is no reason to fill the tier."""
    trace = trace_of(sessions(2, 1500), every_s=8.0)
    replay = Replay(trace, ReplaySettings(CHAIN_HAZARD, 10_000, keep_worth=8))
    verdicts = []
    expire = replay._expire

    def watched(now_ns: int) -> None:
        assert isinstance(replay.policy, ChainHazard)
        verdicts.append(replay.policy.follower.guard.is_lru_ahead)
        expire(now_ns)

    replay._expire = watched  # type: ignore[method-assign]
    replay.run()
    assert sum(verdicts) < len(verdicts) / 10


@pytest.mark.parametrize("expires", [{"keep_worth": 4.0}, {"ttl_s": 1e6}, {}], ids=["worth", "ttl", "never"])
def test_blocks_held_are_counted_over_time(expires: dict[str, float]) -> None:
    builder = TraceBuilder("made", "made", 64)
    for at_s, blocks in ((0, [1, 2, 3]), (10, [4]), (40, [5])):
        builder.add(at_s * S, blocks)
    policy = CHAIN_HAZARD if "keep_worth" in expires else "lru"  # nothing is known so early: nothing expires
    settings = ReplaySettings(policy, 100, **expires)  # type: ignore[arg-type]  # names of floats
    assert Replay(builder.build(), settings).run().held_block_s.tolist() == pytest.approx([0, 30, 120])


def test_what_is_due_expires_while_no_request_comes() -> None:
    builder = TraceBuilder("made", "made", 64)
    for at_s in (0, 1000):
        builder.add(at_s * S, [at_s])
    held = Replay(builder.build(), ReplaySettings("lfu-ttl", 100, ttl_s=100.0)).run().held_block_s
    assert 100 <= held[1] <= 100 + 2 * 1000 / 64
