"""The chain policy: what it learns, that it knows nothing of the future, and what bounds it."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvstore_predictor import prior
from kvstore_predictor.ages import EDGES_S
from kvstore_predictor.features import continued, with_answer
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Trace, TraceBuilder
from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.store.policies import ChainHint, RequestContext, ResidencyClass, Share, create
from kvstored.store.policies.chain_hazard import ChainHazard
from kvstored.store.policies.chains.eviction_order import _DRAW_US, _OLD_S
from kvstored.store.policies.chains.ghost import FAN_BITS, SHARDS, TOUCHED_MAX, ChainGhost, ghost_limit, is_near_end
from kvstored.store.policies.chains.guard import LruGuard
from tests.reference.blocks import BLOCK_BYTES, Shelf, key
from tests.reference.policies import trust_at_once

S = 1_000_000_000
NAME = CHAIN_HAZARD


def mixed_trace(requests: int = 900, *, seed: int = 1, tick_s: float = 3.0) -> Trace:
    """Chats that grow and come back, among one-time prompts of another length. Times stand on ticks, so that many
    requests share one.
    """
    chance = random.Random(seed)
    fresh = iter(range(10**7))
    builder = TraceBuilder("mixed", "made", 512)
    chats: list[list[int]] = [[next(fresh) for _ in range(4)] for _ in range(40)]
    for at in range(requests):
        time_ns = round(at * 0.8 // tick_s * tick_s * S)
        if chance.random() < 0.4:
            blocks = chance.choice(chats)
            blocks += [next(fresh) for _ in range(chance.randrange(1, 3))]
            if len(blocks) > 30:
                del blocks[:]
                blocks += [next(fresh) for _ in range(4)]
        else:
            blocks = [next(fresh) for _ in range(12)]
        builder.add(time_ns, blocks, input_tokens=len(blocks) * 512, output_tokens=chance.randrange(1, 600))
    return builder.build()


def replayed(trace: Trace, capacity: int, policy: str = NAME) -> tuple[Replay, list[int]]:
    replay = Replay(trace, ReplaySettings(policy, capacity))
    return replay, replay.run().hits.tolist()


def in_force(shelf: Shelf) -> ChainHazard:
    policy = create(NAME, shelf.residency, 0)
    assert isinstance(policy, ChainHazard)
    trust_at_once(policy)
    return policy


def test_it_keeps_what_comes_back_among_what_does_not() -> None:
    trace = mixed_trace()
    ours, lru = (sum(replayed(trace, 300, name)[1]) for name in (NAME, "lru"))
    assert ours > 1.15 * lru


def test_it_is_causal() -> None:
    trace = mixed_trace()
    whole = replayed(trace, 250)[1]
    for cut in (200, 451, 452, 453, 700):  # in the middle of a tick, too
        assert replayed(trace.part(0, cut), 250)[1] == whole[:cut]


def test_it_is_deterministic() -> None:
    trace = mixed_trace()
    assert replayed(trace, 200)[1] == replayed(trace, 200)[1]


@pytest.mark.slow
def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstored.store.policies.chains.ghost.GHOST_MIN", 100)
    monkeypatch.setattr("kvstored.store.policies.chains.learning._SLACK", 50)
    replay, _ = replayed(mixed_trace(3000), 100)
    assert isinstance(replay.policy, ChainHazard)
    book = replay.policy.follower.book
    assert len(book.ghosts[0]) <= 2 * 10 * (100 + 40)
    assert book.chains.in_use < 2500


def test_without_evidence_it_is_lru() -> None:
    trace = mixed_trace(50)
    assert replayed(trace, 60)[1] == replayed(trace, 60, "lru")[1]


def test_while_lru_decides_neighbours_leave_together() -> None:
    """Blocks leave in the order in which they would go one by one, also the last ones, once chains decide."""
    orders: list[list[int]] = []
    for at_once in (1, 20):
        shelf, most = Shelf(), 0
        policy = create(NAME, shelf.residency, 0)
        assert isinstance(policy, ChainHazard)
        policy.follower.learning = replace(policy.follower.learning, requests_min=1000)
        for number in range(60):
            shelf.now_ns += S
            chat = number * number % 23
            shelf.chain(*range(3), *range(100 * chat, 100 * chat + 4 + number // 3))
        orders.append([])
        for left, decides in ((200, 1000), (0, 0)):
            policy.follower.learning = replace(policy.follower.learning, requests_min=decides)
            while len(policy) > left:
                run = policy.next_victims(shelf.now_ns, min(at_once, len(policy) - left))
                assert policy.is_lru == bool(left)
                most = max(most, len(run) if left else 0)
                shelf.residency.remove_run(run, 0, Cause.EVICTED, shelf.now_ns)
                orders[-1] += run
        assert most > 10 or at_once == 1
    assert orders[0] == orders[1]


def test_a_session_that_was_evicted_is_known_when_it_returns() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    rows = shelf.chain(0, 1, 2, 3)
    for row in reversed(rows):
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    shelf.now_ns += 5 * S
    shelf.chain(0, 1, 2, 3, 4)
    assert policy.follower.book.learning.returns == 1


def test_branches_from_a_shared_prompt_continue_no_chain() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    for number in range(10, 20):
        shelf.now_ns += S
        shelf.chain(0, 1, number, number + 100)
    assert policy.follower.book.learning.returns == 0
    first = shelf.residency.find(0, (1).to_bytes(16, "big"))
    assert policy.follower.book.shared[first] > 5


def test_a_branch_is_distinguished_from_a_new_chain_and_from_a_continued_one() -> None:
    shelf = Shelf()
    policy = in_force(shelf)

    def kind_after(*blocks: int) -> int:
        shelf.now_ns += S
        rows = shelf.chain(*blocks)
        return policy.follower.book.features[policy.follower.book.owner[rows[-1]]].kind

    assert kind_after(0, 1, 2, 3, 4, 5) == 0
    assert kind_after(0, 1, 20) == 2, "two blocks of another chain, then its own way"
    assert kind_after(0, 30, 31) == 0, "one block is shared by chance"
    assert kind_after(0, 1, 2, 3, 4, 5, 6) == 1


def test_learning_does_not_wait_to_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """While there is room no victim is requested: observations still come to count, step by step."""
    monkeypatch.setattr("kvstored.store.policies.chains.learning._LATE", 4)
    shelf = Shelf()
    policy = in_force(shelf)
    book = policy.follower.book
    for number in range(200):
        shelf.now_ns += S
        shelf.chain(number)
        assert book.learning.requests - book.learning.renewed <= 25 + 40
    assert book.learning.renewed > 100


def test_a_session_that_fell_silent_loses_its_rank_however_little_is_asked_for() -> None:
    builder = TraceBuilder("two sessions", "made", 512)
    quick, slow = range(60), range(100, 120)
    for at in range(40):
        builder.add(at * S, list(quick[: 20 + at]), input_tokens=512, output_tokens=9)
    for at in range(8):  # the tier has no room for both
        builder.add((140 + 8 * at) * S, list(slow[: 8 + at]), input_tokens=512, output_tokens=9)
    trace = builder.build()
    ours, lru = (replayed(trace, 24, name)[1] for name in (NAME, "lru"))
    assert ours[40:] == lru[40:] == [0, *range(8, 15)]


def test_draws_are_rare_and_follow_what_is_used() -> None:
    replay = Replay(mixed_trace(), ReplaySettings(NAME, 250))
    policy = replay.policy
    assert isinstance(policy, ChainHazard)
    candidates = policy.follower.candidates
    drawn = set()
    request = replay.request

    def watched(*arguments: Any) -> int:
        hits = request(*arguments)
        drawn.update((at, each._drawn_s, each._ceiling) for at, each in enumerate(candidates))
        return hits

    replay.request = watched  # type: ignore[method-assign]
    replay.run()
    assert 20 < len(drawn) < 300, "one in some ten of 900 requests"


def test_the_answer_is_a_class_of_its_own_once_known() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    policy.expect(RequestContext(7, 2048, "chat", is_answered_later=True))
    shelf.chain(0, 1, 2)
    before = policy.follower.book.features[0]
    policy.answered(7, 300, shelf.now_ns + S)
    assert policy.follower.book.features[0] == with_answer(before, 300)
    policy.answered(7, 1, shelf.now_ns + S)
    assert policy.follower.book.features[0] == with_answer(before, 300), "an answer counts once"


def test_blocks_that_came_by_themselves_have_chains_too() -> None:
    """A demotion fills the tier from the tail to the head, and nothing is used."""
    shelf = Shelf("host", "nvme")
    policy = create(NAME, shelf.residency, 1)
    trust_at_once(policy)
    assert isinstance(policy, ChainHazard)
    rows = shelf.chain(0, 1, 2, 3)
    for row in reversed(rows):
        shelf.residency.attach(row, 1, shelf.slot(), 1)
    for row in rows:
        shelf.residency.detach(row, 0)
    assert policy.next_victim(1) == rows[-1]
    assert len({policy.follower.book.owner[row] for row in rows}) == 1


def test_shares_stand_above_its_order() -> None:
    shelf = Shelf(tenants=2)
    policy = in_force(shelf)
    policy.set_share(0, Share(min_bytes=2 * BLOCK_BYTES))
    mine = [shelf.chain(number, tenant=0)[0] for number in range(3)]
    other = shelf.chain(9, tenant=1)[0]
    order = []
    while (row := policy.next_victim(shelf.now_ns)) >= 0:
        order.append(row)
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    assert sorted(order) == sorted([mine[0], other])


def test_classes_come_from_the_ranks() -> None:
    trace = mixed_trace()
    replay, _ = replayed(trace, 300)
    policy, now_ns = replay.policy, int(trace.times_ns[-1])
    assert isinstance(policy, ChainHazard)
    assert not policy.is_lru
    counts = policy.class_counts(now_ns)
    rows = np.flatnonzero(np.frombuffer(replay.residency.rows.mask, np.uint8)).tolist()
    classes = [policy.residency_class(row, now_ns) for row in rows]
    assert counts == {kind: classes.count(kind) for kind in ResidencyClass}
    assert counts[ResidencyClass.HOT] + counts[ResidencyClass.WARM] > 0
    later = policy.class_counts(now_ns + 6 * 3600 * S)
    assert later[ResidencyClass.HOT] <= counts[ResidencyClass.HOT]


# The parts


def test_a_chain_that_another_has_continued_is_due_no_more() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    first = shelf.chain(1, 2, 3, 4)
    chains, chain = policy.follower.book.chains, policy.follower.book.owner[first[-1]]
    policy.on_hint(0, first[-1], key(4), ChainHint(due_ns=5 * S), 0)
    shelf.now_ns = S
    again = shelf.chain(1, 2, 3, 5, 6)  # the last block was partial
    assert policy.follower.book.owner[again[-1]] != chain == policy.follower.book.owner[first[-1]]
    assert (chains.live[chain], chains.due_s[chain]) == (0, 0.0)
    assert policy.next_victim(2 * S) == first[-1]


def test_parts_of_an_answer_do_not_change_the_pace() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    shelf.chain(1, 2, 3)
    shelf.now_ns = 60 * S
    row = shelf.chain(1, 2, 3, 4)[-1]
    chain, pace = policy.follower.book.owner[row], policy.follower.book.chains.pace[policy.follower.book.owner[row]]
    policy.arriving(0, row, [key(5)], 61 * S)
    assert policy.follower.book.chains.length[chain] == 5
    assert policy.follower.book.chains.pace[chain] == pace == pytest.approx(math.log(60))


def test_the_pace_of_a_session_is_the_mean_of_its_gaps() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    blocks, pace = [1, 2, 3], 0.0
    for turn, gap_s in enumerate((0, 4, 4, 64)):
        shelf.now_ns += gap_s * S
        row = shelf.chain(*blocks)[-1]
        blocks.append(blocks[-1] + 1)
        chain = policy.follower.book.owner[row]
        if turn:
            pace = math.log(gap_s) if turn == 1 else 0.5 * (pace + math.log(gap_s))
        assert policy.follower.book.chains.pace[chain] == pytest.approx(pace)
    features = policy.follower.book.features[chain]
    same = continued(1, 1, 1, 64.0, math.exp(pace), None)
    assert (features.gap, features.pace) == (same.gap, same.pace)
    assert features.gap != features.pace, "one long pause does not make a slow session"


def test_a_chain_that_never_returned_counts_in_every_bin() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    for number in range(0, 120, 2):
        shelf.chain(number, number + 1)
    shelf.now_ns = round(EDGES_S[-1] * 3) * S
    for number in range(1000, 1200, 2):
        shelf.chain(number, number + 1)
    ladders = policy.follower.book.tables.counts()
    exposed, returned = next(ladder for ladder in reversed(ladders) if ladder.order).counts[()]
    assert exposed[-1] > 50 > 0 == returned[-1]


def test_of_chains_worth_the_same_the_one_that_is_dearer_to_compute_stays() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    short = shelf.chain(*range(1, 50))
    shelf.now_ns += 1
    long = shelf.chain(*range(1000, 1200))
    book, candidates = policy.follower.book, policy.follower.candidates[0]
    chains, ours, theirs = book.chains, book.owner[short[-1]], book.owner[long[-1]]
    chains.base[theirs] = chains.base[ours]
    worth = candidates.value(ours, 0.0)
    assert worth < candidates.value(theirs, 0.0) < 1.1 * worth


def test_what_others_gave_a_prefix_is_known_when_it_comes_back() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    for number in range(10, 26):  # the first belong to a session, as far as is known then
        rows = shelf.chain(1, 2, number)
        shelf.residency.remove(rows[2], Cause.EVICTED, shelf.now_ns)
    before = policy.follower.book.shared[rows[1]]
    assert before > 3
    for row in (rows[1], rows[0]):
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    assert policy.follower.book.shared[rows[1]] == 0
    again = shelf.chain(1, 2, 30)
    assert policy.follower.book.shared[again[1]] >= before


def test_touches_of_what_has_left_are_bounded() -> None:
    ghost = ChainGhost(ghost_limit(0))
    for number in range(TOUCHED_MAX + 5):
        ghost.remember_touches(key(number), 1.0, 0.0)
    assert len(ghost.touched) == TOUCHED_MAX
    assert key(4) not in ghost.touched and key(5) in ghost.touched


def test_a_request_that_can_bear_it_looks_at_all_chains_anew() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    for number in range(0, 20, 2):
        shelf.chain(number, number + 1)
    candidates = policy.follower.candidates[0]
    for _ in range(2):  # the first draws, the second says that more victims are wanted
        policy.next_victim(shelf.now_ns)
    now_s = shelf.now_ns * 1e-9
    took_us = next(us for us in range(1, 1000) if us >= 4 * _DRAW_US + 4 * policy.follower.book.chains.slots / 40)
    assert candidates.refresh(now_s, took_us * 0.9) == 0.0, "it has just been done"
    assert candidates.refresh(now_s, took_us) > 0.0
    assert candidates.refresh(now_s, took_us) == 0.0, "no victim was requested since"
    policy.next_victim(shelf.now_ns)
    later_s = now_s + _OLD_S
    assert candidates.refresh(later_s, 0.0) > 0.0, "the next victim would have waited for it"
    candidates.first(later_s, ())
    assert candidates.refresh(later_s, 0.0) == 0.0


def test_the_ghost_forgets_the_oldest_generation() -> None:
    forgotten: list[int] = []
    ghost = ChainGhost(2 * SHARDS, lambda chains: forgotten.extend(chains.tolist()))
    keys = [bytes([number, 7]) for number in range(6)]  # of one shard, whose generations hold two and one more
    for number, name in enumerate(keys[:3]):
        ghost.remember(name, number, number)
    assert [ghost.packed(name) for name in keys[:4]] == [0 << FAN_BITS | 0, 1 << FAN_BITS | 1, 2 << FAN_BITS | 2, -1]
    assert sorted(ghost.chains(7).tolist()) == [0, 1, 2]
    for number, name in enumerate(keys[3:], start=3):
        ghost.remember(name, number, 0)
    assert [ghost.owner_of(name) for name in keys] == [-1, -1, -1, 3, 4, 5]
    assert forgotten == [0, 1, 2]


@pytest.mark.parametrize("is_small", [True, False])
def test_what_follows_a_forgotten_block_is_forgotten_in_a_ghost_that_is_not_small(is_small: bool) -> None:
    shelf = Shelf()
    follower = in_force(shelf).follower
    follower.know_tenant(0)
    book, keys = follower.book, [key(number) for number in range(6)]
    chain = book.chains.take()
    for number in (0, 2, 3):
        book.ghosts[0].remember(keys[number], chain, 1)
    book.ghosts[0].limit = ghost_limit(0) if is_small else 10**5
    rows: list[int] = []
    for part in (keys[:5], keys[5:]):
        rows += shelf.residency.store_run(
            0, part, -1, 0, [shelf.slot() for _ in part],
            fingerprint_id=7, group=0, payload_bytes=BLOCK_BYTES, now_ns=S,
        )  # fmt: skip
    known = [1, 0, 1, 1, 0, 0] if is_small else [1, 0, 0, 0, 0, 0]
    assert [book.owner[row] for row in rows] == [chain if each else -1 for each in known]
    assert [book.fan[row] for row in rows] == known


def test_the_ghost_of_a_large_tier_is_no_larger_than_the_tier() -> None:
    assert ghost_limit(0) >= 1000
    assert ghost_limit(9_000) == 90_000
    assert ghost_limit(1_000_000) == 1_000_000
    assert [ghost_limit(rows) for rows in range(0, 10**6, 10**4)] == sorted(map(ghost_limit, range(0, 10**6, 10**4)))


def test_the_guard_calls_lru_when_lru_would_hit_more_and_tries_again() -> None:
    guard = LruGuard()
    keys = [number.to_bytes(16, "big") for number in range(1, 41)]
    guard.resize(40)
    for _ in range(60):
        guard.used(0, keys, range(40), fresh=40)  # a tier that keeps nothing, where LRU keeps all
    assert guard.is_lru_ahead
    for _ in range(300):
        guard.used(0, keys, range(40), fresh=0)
    assert not guard.is_lru_ahead
    for _ in range(1000):
        guard.used(0, keys, range(40), fresh=0)
    assert not guard.is_lru_ahead


def test_the_guard_is_bounded_where_the_tier_is_never_full() -> None:
    """For any number of misses. When the tier is full at last, the guard holds what LRU would."""
    guard = LruGuard()
    for first in range(0, 20_000, 100):
        missing = [bytes(15 - 2) + number.to_bytes(3, "big") for number in range(first, first + 100)]
        guard.used(0, [], (), 0, missing)
    assert len(guard._held) <= 2048
    for rows in range(0, 8192, 64):
        guard.resize(rows, is_full=False)
        guard.used(0, [], (), 0, [bytes(8) + number.to_bytes(8, "big") for number in range(rows, rows + 64)])
        assert len(guard._held) <= 2048
    guard.resize(8192)
    guard.used(0, [], (), 0, [])
    assert sorted(guard._held) == [(0, number.to_bytes(16, "big")) for number in range(0, 8192, 8)]


def test_the_guard_samples_a_large_tier() -> None:
    guard = LruGuard()
    guard.resize(100_000)
    for first in range(0, 300_000, 100):
        guard.used(0, [number.to_bytes(16, "big") for number in range(first, first + 100)], range(100), fresh=100)
    assert len(guard._held) <= 1024


def test_the_shipped_model_has_a_card_and_fits_the_bins() -> None:
    tables = prior.shipped()
    assert {table.workload for table in tables} == {"chat", "agent"}
    for table in tables:
        for seen in table.counts.values():
            assert (seen[1] <= seen[0]).all()
    text = prior.write({"what": "test"}, list(tables), least=0)
    for table, again in zip(tables, prior.read(text), strict=True):
        assert again[:2] == table[:2] and list(again.counts) == list(table.counts)
        assert np.array_equal([*again.counts.values()], [*table.counts.values()])
    none = prior.Prior("chat", ("kind",), {})
    assert prior.read(prior.write({}, [none, tables[0]], least=1e6)) == (none, tables[0]._replace(counts={}))
    with pytest.raises(ValueError, match="refit"):
        prior.read('{"format": 0}')


def test_blocks_that_wait_for_their_use_cost_no_request_a_look_at_all_of_them() -> None:
    """The blocks wait as blocks do that a prefetch has brought, of which there may be many before the tier is full."""
    shelf = Shelf()
    policy = in_force(shelf)
    for number in range(2000):
        shelf.store(number)
    assert len(policy.follower.fresh) < 600
    assert policy.next_victim(S) == shelf.residency.find(0, key(0))


def test_a_block_that_went_before_its_use_is_forgotten() -> None:
    """The block's row is another block's next."""
    shelf = Shelf()
    policy = in_force(shelf)
    for row in reversed(shelf.chain(1, 2)):
        shelf.residency.remove(row, Cause.EVICTED, S)
    row = shelf.store(1)  # the ghost knows whose it was
    shelf.residency.remove(row, Cause.DROPPED, S)
    assert policy.follower.fresh == []
    assert shelf.store(7) == row
    assert policy.follower.fresh == [row]


def test_a_chain_s_number_that_becomes_another_tenant_s_names_none_of_its_blocks_to_the_first() -> None:
    shelf = Shelf(tenants=2)
    policy = in_force(shelf)
    book = policy.follower.book
    rows = shelf.chain(1, 2)
    chain = book.owner[rows[0]]
    assert policy.next_victim(S, tenant=0) == rows[-1]  # it is among the candidates
    for row in reversed(rows):
        shelf.residency.remove(row, Cause.EVICTED, S)
    stale = book.chains.entry[chain]
    theirs = shelf.chain(11, 12, tenant=1)
    book.chains.tenant[chain], book.chains.tail[chain] = 1, theirs[-1]  # it was free, and was taken
    policy.follower.candidates[1].look_at(chain, 1.0)
    while book.chains.entry[chain] < stale:
        policy.follower.candidates[1].look_at(chain, 1.0)
    assert policy.next_victim(S, tenant=0) == -1


def test_who_goes_first_of_one_tenant_stays_when_another_is_asked() -> None:
    shelf = Shelf(tenants=2)
    policy = in_force(shelf)
    shelf.chain(1, 2)
    theirs = shelf.chain(11, 12, tenant=1)
    entry, chain = policy.follower.book.chains.entry, policy.follower.book.owner[theirs[-1]]
    assert policy.next_victim(S, tenant=1) == theirs[-1]
    valid = entry[chain]
    assert valid
    policy.next_victim(S, tenant=0)
    assert entry[chain] == valid


def test_the_next_question_about_a_document_continues_the_last_one() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    text = range(1, 41)
    for question in range(6):  # of two blocks each
        shelf.chain(*text, 100 + 2 * question, 101 + 2 * question)
    assert policy.follower.book.learning.returns == 5
    shelf.chain(*range(1, 21), 200)  # half of it is another's
    assert policy.follower.book.learning.returns == 5


def test_what_is_near_the_end_of_a_chain() -> None:
    assert is_near_end(1, 2) and is_near_end(3, 5) and is_near_end(95, 100)
    assert not is_near_end(2, 4) and not is_near_end(94, 100) and not is_near_end(10, 13)


@pytest.mark.parametrize(
    ("dues_s", "now_s", "leaves"),
    [((10.4, 10.8), 10, 1), ((2, 14), 12, 0), ((None, 3600), 10, 1)],
    ids=["due-later", "overdue-for-long", "later-than-foretold"],
)
def test_of_two_chains_the_one_that_is_announced_for_later_leaves_first(
    dues_s: tuple[float | None, float], now_s: int, leaves: int
) -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    chains = shelf.chain(1, 2, 3), shelf.chain(11, 12, 13)  # the first one is older, by one use
    for rows, last, due_s in zip(chains, (3, 13), dues_s, strict=True):
        if due_s is not None:
            policy.on_hint(0, rows[-1], key(last), ChainHint(due_ns=round(due_s * S)), 0)
    shelf.now_ns = now_s * S
    assert policy.next_victim(now_s * S) == chains[leaves][-1]
