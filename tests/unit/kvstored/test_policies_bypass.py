"""The daemon passes more than single blocks to a policy: what a get missed, what is about to come, what an engine
expects. A whole request gives the same facts, and the chain policy makes the same decisions, bypass among them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import copy
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.identity import NO_PARENT
from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.replay import Replay, ReplaySettings
from kvstore_simulator.trace import Op, Trace, TraceBuilder
from kvstored.clock import ManualClock
from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.rpc.verbs import Verbs
from kvstored.store.operations.get import MISSING_MAX, Gets
from kvstored.store.operations.lookup import DUE_MAX_MS, Hints
from kvstored.store.operations.records import GetRequest
from kvstored.store.policies import ChainHint, EvictionPolicy, RequestContext
from kvstored.store.policies.chain_hazard import ChainHazard
from kvstored.store.policies.lru import Lru
from kvstored.store.prefetch.feed import Feed
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor
from kvstored.store.prefetch.recent import PUT_AFTER_GET_NS
from kvstored.store.remote import ComputeTimes
from kvstored.tier_set import NO_TIERS
from tests.reference.blocks import Shelf, key
from tests.unit.kvstored.test_policies_chain_hazard import in_force

S = 1_000_000_000
SESSION: Any = SimpleNamespace(
    session_id=1,
    tenant_id=0,
    device_tiers=NO_TIERS,
    may_write=True,
    fingerprint=Fingerprint("m", "w", groups=(LayerGroup(0, layers=(0,), bytes_per_token_per_layer=8),)),
)


def chats_and_strays(ops: tuple[Op, ...], requests: int = 1200) -> Trace:
    """Sessions that go on until they end, and prompts that are never requested again; each request as `ops`."""
    chance, at_us = random.Random(4), 0
    fresh = iter(range(10**7))
    builder = TraceBuilder("made", "made", 64)
    chats: list[list[int]] = [[next(fresh) for _ in range(3)] for _ in range(16)]
    for _ in range(requests):
        at_us += round(chance.expovariate(1 / 1.5) * 1e6) + 1
        if chance.random() < 0.6:
            blocks = chance.choice(chats)
            blocks += [next(fresh) for _ in range(chance.randrange(1, 3))]
            if len(blocks) > 16:
                blocks[:] = [next(fresh) for _ in range(3)]
        else:
            blocks = [next(fresh) for _ in range(20)]
        for op in ops:
            builder.add(1000 * at_us, list(blocks), op=op)
    return builder.build()


@pytest.mark.slow
def test_a_get_and_a_put_are_worth_what_a_whole_request_is() -> None:
    """The order of events means luck at any one capacity, such as when the guard calls for LRU in the beginning; over
    some of them it evens out.
    """
    hits = {"whole": 0, "apart": 0}
    for capacity in (60, 90, 120, 130, 150, 180):
        whole = Replay(chats_and_strays((Op.REQUEST,)), ReplaySettings(CHAIN_HAZARD, capacity)).run()
        apart = Replay(chats_and_strays((Op.GET, Op.PUT)), ReplaySettings(CHAIN_HAZARD, capacity)).run()
        lru = Replay(chats_and_strays((Op.REQUEST,)), ReplaySettings("lru", capacity)).run()
        assert apart.evicted["bypassed"] > 100
        assert apart.hits.sum() > 1.1 * lru.hits.sum()
        assert apart.hits.sum() > 0.8 * whole.hits.sum()
        hits["whole"] += int(whole.hits.sum())
        hits["apart"] += int(apart.hits.sum())
    assert hits["apart"] > 0.97 * hits["whole"]


@pytest.mark.parametrize("policy", ["lru", "lfu-ttl", "fifo", "arc", "s3-fifo"])
def test_who_ranks_no_chains_declines_nothing(policy: str) -> None:
    trace = chats_and_strays((Op.GET, Op.PUT), requests=200)
    assert Replay(trace, ReplaySettings(policy, 60)).run().evicted["bypassed"] == 0


@pytest.mark.parametrize("policy", ["lru", CHAIN_HAZARD])
def test_a_recorded_put_makes_room_for_neighbours_together(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon does."""
    builder = TraceBuilder("puts", "made", 512)
    for number in range(7):
        builder.add(S * number, range(20 * number, 20 * number + 20), op=Op.PUT)
    replay, together = Replay(builder.build(), ReplaySettings(policy, 60)), list[int]()
    removed = replay.policy.removed

    def counted(rows: Sequence[int]) -> None:
        together.append(len(rows))
        removed(rows)

    monkeypatch.setattr(replay.policy, "removed", counted)
    assert replay.run().evicted["evicted"] == 80
    assert together == [20] * 4


@pytest.mark.parametrize("capacity", [60, 400])
def test_shared_blocks_leave_together_when_they_would_leave_one_after_another(capacity: int) -> None:
    """Sessions that begin alike and part later: nearly all of their blocks are shared."""
    chance, fresh = random.Random(7), iter(range(1000, 10**7))
    builder = TraceBuilder("alike", "made", 512)
    sessions = [[*range(40 * (number % 5), 40 * (number % 5) + 30)] for number in range(20)]
    for at in range(300):
        blocks = sessions[chance.randrange(20)]
        blocks += [next(fresh) for _ in range(chance.randrange(1, 4))]
        builder.add(round(at * 0.7 * S), blocks, input_tokens=len(blocks) * 512, output_tokens=100)
        if len(blocks) > 70:
            del blocks[chance.randrange(30, 60) :]
    trace, together = builder.build(), list[int]()

    def victims(*, one_by_one: bool) -> list[bytes]:
        replay, found = Replay(trace, ReplaySettings(CHAIN_HAZARD, capacity)), list[bytes]()
        policy, residency = replay.policy, replay.residency
        assert isinstance(policy, ChainHazard)
        next_victims, removed = policy.next_victims, policy.removed

        def noted(rows: Sequence[int]) -> None:
            found.extend(map(residency.key, rows))
            shared = policy.follower.book.shared
            together.append(sum(shared[row] > 0 for row in rows))
            removed(rows)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(policy, "removed", noted)
            if one_by_one:
                patch.setattr(policy, "next_victims", lambda now_ns, limit: next_victims(now_ns, 1))
            replay.run()
        return found

    alone = victims(one_by_one=True)
    assert max(together) == 1
    assert victims(one_by_one=False) == alone
    assert max(together) > 5


def test_what_was_refused_is_remembered_and_counts_as_used_only_if_it_was_declined() -> None:
    shelf = Shelf()
    for cause, uses in ((Cause.DECLINED, 1), (Cause.NO_ROOM, 1), (Cause.OVER_QUOTA, 1), (Cause.DECLINED, 2)):
        shelf.residency.record_refusal(0, key(3), cause, 5)
        absence = shelf.residency.why_missing(0, key(3))
        assert (absence.cause, absence.accesses) == (cause, uses)


def test_a_block_that_was_not_announced_is_not_declined() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    rows = shelf.chain(1, 2, 3)
    assert not policy.declines(0, key(9), 0, rows[-1], S)


def test_a_tenant_that_is_new_to_the_tier_is_not_declined_unheard() -> None:
    """The tenant's blocks may be known: on NVMe alone, after a start."""
    shelf = Shelf(tenants=3)
    policy = in_force(shelf)
    rows = shelf.chain(1, 2, 3)
    assert not policy.declines(2, key(9), 0, rows[-1], S)


def test_a_chain_is_not_displaced_by_its_own_continuation() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    rows = shelf.chain(1, 2, 3)
    shelf.residency.request_run(0, rows, [key(4), key(5)], 2 * S)
    assert policy.next_victim(2 * S) == rows[-1]
    assert policy.declines(0, key(5), 4, rows[-1], 2 * S)


def feed_of(shelf: Shelf, policy: EvictionPolicy) -> Feed:
    unused: Any = None
    return Feed(shelf.residency, [policy], GuardedPredictor(None), unused, unused, ComputeTimes())


def store_of(shelf: Shelf, policy: EvictionPolicy, now_ns: int) -> Any:
    """Return the part of a store that operations use, as far as these tests go."""
    limits = SimpleNamespace(lease_ttl_ms=1000, max_keys=8, leases_per_client=8)
    store = MagicMock(residency=shelf.residency, clock=ManualClock(now_ns), feed=feed_of(shelf, policy))
    store.config.limits = limits
    return store


def get_over(shelf: Shelf, policy: EvictionPolicy) -> Gets:
    return Gets(store_of(shelf, policy, S), MagicMock())


def test_a_prompt_s_length_is_not_taken_for_another_request_s() -> None:
    """The tier's policy does not hear of a request whose blocks are elsewhere."""
    shelf = Shelf("host", "nvme", tenants=2)
    policy = in_force(shelf)
    below = shelf.chain(1, 2, tier=1)
    get = get_over(shelf, policy)
    tokens, prompt = [shelf.residency.token(row) for row in below], RequestContext(5, 777)
    get._count_access(SESSION, tokens, GetRequest(key(1) + key(2), context=prompt), 2, S)
    shelf.chain(11, 12, tenant=1)
    assert policy.follower.book.chains.tokens[policy.follower.book.owner[shelf.residency.find(1, key(12))]] == -1
    get._count_access(SESSION, tokens, GetRequest(key(1) + key(2) + key(3), context=prompt), 2, S)
    assert policy.follower.book.chains.tokens[policy.follower.book.ghosts[0].owner_of(key(3))] == 777


def test_an_answer_hint_that_is_repeated_counts_once() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    policy.expect(RequestContext(1, 200))
    rows = shelf.chain(1, 2, 3)
    chains, chain = policy.follower.book.chains, policy.follower.book.owner[rows[-1]]
    for tokens in (30, 30, 45):
        policy.on_hint(0, rows[-1], key(3), ChainHint(answer_tokens=tokens), S)
    assert chains.tokens[chain] == 245
    policy.expect(RequestContext(2, 260))
    rows = shelf.chain(1, 2, 3, 4)
    chain = policy.follower.book.owner[rows[-1]]
    policy.on_hint(0, rows[-1], key(4), ChainHint(answer_tokens=10), 2 * S)
    assert chains.tokens[chain] == 270, "of the next request it is another one"


def test_policies_receive_a_bounded_number_of_missing_blocks() -> None:
    """Each report costs time that everybody waits for."""
    shelf, missed = Shelf(), []

    class Listening(Lru):
        def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
            missed.extend(missing)

        def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None: ...

    policy = Listening(shelf.residency, 0)
    shelf.residency.listen(0, policy)
    asked = GetRequest(b"".join(key(number) for number in range(MISSING_MAX + 50)))
    get_over(shelf, policy)._count_access(SESSION, [], asked, 20, S)
    assert missed == [key(number) for number in range(20, 20 + MISSING_MAX)]


def test_the_put_of_a_whole_chain_reports_what_was_missed_unless_a_get_did() -> None:
    """An engine whose lookup finds nothing sends no get."""
    shelf, missed = Shelf(), []

    class Listening(Lru):
        def requested(self, rows: Sequence[int], missing: Sequence[bytes], tenant: int, now_ns: int) -> None:
            missed.append((list(rows), list(missing)))

        def forget(self, tenant: int, keys: Sequence[bytes] | None) -> None:
            """Do nothing: the policy knows no keys."""

    policy = Listening(shelf.residency, 0)
    shelf.residency.listen(0, policy)
    feed = feed_of(shelf, policy)
    chain, other = [key(1), key(2)], [key(11), key(12), key(13)]
    feed.put(0, chain, NO_PARENT, S)
    feed.put(0, chain, NO_PARENT, 2 * S)  # computed once more: it was declined
    assert missed == [([], chain)] * 2
    feed.got(0, 1, b"".join(other), 0, None, 3 * S)
    feed.put(0, other, NO_PARENT, 4 * S)
    feed.put(0, other[1:], other[0], 5 * S)
    assert missed[2:] == [], "the get of this request has been reported"
    shelf.store(1)
    feed.put(0, chain, NO_PARENT, 6 * S)
    assert missed[2:] == [], "it was not missed"
    feed.put(0, other, NO_PARENT, 3 * S + PUT_AFTER_GET_NS)
    assert missed[2:] == [([], other)], "of another request"


def hinted(shelf: Shelf, policy: ChainHazard, now_ns: int, hint: pb.Hint, session: Any = SESSION) -> pb.HintReply:
    """The answer to a hint."""
    store, operations = store_of(shelf, policy, now_ns), MagicMock()
    operations.hints = Hints(store)
    answer = Verbs(store, operations, MagicMock(), MagicMock(), MagicMock(), MagicMock()).quick["hint"](
        session, pb.Request(hint=hint)
    )
    assert answer is not None
    return answer.hint


def test_a_reader_of_a_pool_does_not_say_that_a_chain_is_over() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    shelf.chain(1, 2, 3)
    shelf.now_ns = S
    last = shelf.chain(11, 12, 13)
    before, session = policy.next_victim(300 * S), copy(SESSION)
    over = pb.Hint(
        set=pb.KeySet(keys=b"".join(map(key, (11, 12, 13)))), next_step=pb.NEXT_STEP_CLOSED, will_continue=0.0
    )
    session.may_write = False
    hinted(shelf, policy, 300 * S, over, session)
    assert policy.next_victim(300 * S) == before != last[-1]
    hinted(shelf, policy, 300 * S, over)
    assert policy.next_victim(300 * S) == last[-1]


def test_a_queued_request_keeps_its_chain() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    first = shelf.chain(1, 2, 3)
    shelf.now_ns = S
    shelf.chain(11, 12, 13)
    assert policy.next_victim(300 * S) == first[-1]
    keys = b"".join(map(key, (1, 2, 3, 4, 5)))  # what it adds is not there yet
    reply = hinted(shelf, policy, 300 * S, pb.Hint(set=pb.KeySet(keys=keys), due_in_ms=2000))
    assert reply.known_blocks == 3
    assert policy.next_victim(300 * S) not in first


def test_a_tail_beyond_what_is_queued_leaves_first_and_the_rest_stays() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    first = shelf.chain(*range(1, 13))
    other = shelf.chain(*range(31, 43))
    policy.on_hint(0, first[5], key(6), ChainHint(due_ns=round(1.5 * S)), 0)
    policy.on_hint(0, other[11], key(42), ChainHint(due_ns=round(1.5 * S)), 0)
    leave = [policy.next_victim(S)]
    while leave[-1] != other[-1] and len(leave) < 12:
        shelf.residency.remove(leave[-1], Cause.EVICTED, S)
        leave.append(policy.next_victim(S))
    assert leave[:5] == first[:6:-1], "down to the one that may be partial"
    assert first[5] not in leave


def test_a_word_of_an_engine_counts_at_once() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    first, second = shelf.chain(1, 2, 3), shelf.chain(11, 12, 13)
    shelf.now_ns = 2 * S
    assert policy.next_victim(2 * S) == first[-1], "of two alike the older"
    policy.on_hint(0, second[-1], key(13), ChainHint(will_continue=0.0, next_step=NextStep.NEXT_STEP_CLOSED), 2 * S)
    assert policy.next_victim(2 * S) == second[-1]


def test_a_field_that_a_hint_leaves_out_keeps_its_value() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    rows = shelf.chain(1, 2, 3)
    for hint in (ChainHint(0.95), ChainHint(next_step=NextStep.NEXT_STEP_TOOL_CALL), ChainHint(answer_tokens=40)):
        policy.on_hint(0, rows[-1], key(3), hint, 2 * S)
    features = policy.follower.book.features[policy.follower.book.owner[rows[-1]]]
    assert (features.chance, features.next_step, features.answer) == (5, NextStep.NEXT_STEP_TOOL_CALL, 2)


def test_a_queued_request_holds_what_it_will_use_and_no_more() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    first = shelf.chain(1, 2, 3, 4, 5)
    book = policy.follower.book
    chain = book.owner[first[-1]]
    for now_ns in (0, S):
        policy.on_hint(0, first[1], key(2), ChainHint(due_ns=9 * S), now_ns)  # of another session, which begins alike
        due = [book.chains.due_rank(chain, depth, S / 1e9) for depth in range(5)]
        assert due == [pytest.approx(1 / 8)] * 3 + [0.0] * 2, "the last block may be partial"
        shelf.now_ns = 50 * S
        assert book.chains.due_rank(chain, 0, 50.0) == 0.0, "it did not come"
        shelf.now_ns = S
    policy.on_hint(0, first[4], key(5), ChainHint(due_ns=5 * S), S)
    assert book.chains.due_rank(chain, 4, S / 1e9) == pytest.approx(1 / 4)
    policy.on_hint(0, first[1], key(2), ChainHint(due_ns=2 * S), S)
    assert book.chains.due_rank(chain, 4, S / 1e9) == pytest.approx(1 / 4), (
        "who uses less does not say less of the rest"
    )


@pytest.mark.parametrize(
    "hint", [ChainHint(will_continue=0.95), ChainHint(next_step=1), ChainHint(will_continue=0.0, answer_tokens=40)]
)
def test_a_hint_becomes_a_feature_of_the_chain(hint: ChainHint) -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    rows = shelf.chain(1, 2, 3)
    policy.on_hint(0, rows[-1], key(3), hint, 2 * S)
    features = policy.follower.book.features[policy.follower.book.owner[rows[-1]]]
    expected = 0 if hint.will_continue is None else 1 + min(int(hint.will_continue * 5), 4)
    assert (features.chance, features.next_step) == (expected, hint.next_step)
    assert (features.answer > 0) == (hint.answer_tokens > 0)


def test_a_hint_about_what_is_unknown_changes_nothing() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    policy.on_hint(0, -1, key(7), ChainHint(will_continue=0.5, due_ns=S), S)
    assert policy.next_victim(S) == -1


def test_a_hint_about_another_tenant_s_block_does_nothing_and_reveals_nothing() -> None:
    shelf = Shelf(tenants=2)
    policy = in_force(shelf)
    theirs = shelf.chain(1, 2, 3, tenant=1)
    book = policy.follower.book
    chain = book.owner[theirs[-1]]
    before = book.features[chain]
    keys = b"".join(map(key, (1, 2, 3)))
    hint = pb.Hint(set=pb.KeySet(keys=keys), will_continue=0.99, due_in_ms=1, answer_tokens=50)
    reply = hinted(shelf, policy, 2 * S, hint)
    assert reply == pb.HintReply()
    for row in reversed(theirs):
        shelf.residency.remove(row, Cause.EVICTED, 3 * S)  # now a ghost of theirs knows it, and none of ours
    assert hinted(shelf, policy, 4 * S, hint) == reply
    assert (book.features[chain], book.chains.due_s[chain]) == (before, 0.0)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"will_continue": 1.5}, "from 0 to 1"),
        ({"will_continue": float("nan")}, "from 0 to 1"),
        ({"due_in_ms": DUE_MAX_MS + 1}, "due_in_ms"),
        ({"set": pb.KeySet()}, "last key"),
        ({"set": pb.KeySet(keys=key(1) * 9)}, "limit is 8"),
        ({"set": pb.KeySet(group=4, keys=key(1))}, "layer group 4"),
    ],
)
def test_a_hint_that_makes_no_sense_is_refused(fields: dict[str, Any], words: str) -> None:
    shelf = Shelf()
    with pytest.raises(KVStoreError, match=words) as caught:
        hinted(shelf, in_force(shelf), S, pb.Hint(**{"set": pb.KeySet(keys=key(1)), **fields}))
    assert caught.value.kind in (ErrorKind.INVALID, ErrorKind.TOO_LARGE)


def test_a_next_step_of_a_later_release_is_none() -> None:
    shelf = Shelf()
    policy = in_force(shelf)
    shelf.chain(1, 2, 3)
    hint = pb.Hint(set=pb.KeySet(keys=key(3)))
    hint.MergeFromString(bytes((4 << 3, 99)))  # next_step = 99
    hinted(shelf, policy, S, hint)
    assert policy.follower.book.features[policy.follower.book.owner[2]].next_step == 0
