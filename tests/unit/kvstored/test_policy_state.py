"""The file that outlives the daemon brings back what policies have learned, but for what must not be in it."""

from __future__ import annotations

import pickle
import random
from pathlib import Path

import numpy as np
import pytest

from kvstore_simulator.policies import POLICIES, create
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.lifecycle import Cause
from kvstored.policy_names import CHAIN_HAZARD
from kvstored.state.tables import CONTENTS, PIECE, packed
from kvstored.store.policies import EvictionPolicy, Learns, Origin, joined, succeed
from kvstored.store.policies.chain_hazard import ChainHazard
from kvstored.store.policies.chains import state as chain_state
from tests.reference import learning
from tests.reference.blocks import Shelf, key
from tests.reference.examples import each_nth
from tests.reference.learning import learned_of
from tests.reference.policy_state import carried, exported

NAME = CHAIN_HAZARD
SYSTEM_PROMPT = 10**6


def chats(shelf: Shelf, tenant: int = 0, first: int = 0, requests: int = 300) -> None:
    """Sessions that grow, every fifth after one system prompt; a quarter of their blocks leaves meanwhile."""
    chance = random.Random(first)
    sessions = [[first + number * 100] for number in range(12)]
    for number in range(0, 12, 5):
        sessions[number].insert(0, SYSTEM_PROMPT + tenant)
    for _ in range(requests):
        shelf.now_ns += NS_PER_S
        session = chance.choice(sessions)
        if len(session) < 20:
            session.append(session[-1] + 1)
        shelf.chain(*session, tenant=tenant)
        row = shelf.residency.find(tenant, key(session[-1]))
        if chance.random() < 0.25 and shelf.residency.may_forget(row):
            shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)


def chain_policy(shelf: Shelf) -> ChainHazard:
    policy = create(NAME, shelf.residency, 0)
    assert isinstance(policy, ChainHazard)
    return policy


def saved(tmp_path: Path, shelf: Shelf, policies: list[EvictionPolicy], clock: ManualClock) -> bytes:
    """All that is saved."""
    return learning.keep(tmp_path, learned_of(shelf.residency, clock, policies)[0])


def restored(tmp_path: Path, shelf: Shelf, clock: ManualClock, name: str = NAME) -> EvictionPolicy:
    learned, policies = learned_of(shelf.residency, clock, [create(name, shelf.residency, 0)])
    learned.read(learning.kept(tmp_path), ())
    learning.hand_out(learned, renew=True)
    return policies[0]


def knows(policy: EvictionPolicy, tenant: int, number: int) -> bool:
    """Return whether the policy can say whose a block is."""
    assert isinstance(policy, ChainHazard)
    return policy.follower.book.ghosts[tenant].owner_of(key(number)) >= 0


def test_a_chain_that_goes_on_after_the_restart_is_continued(tmp_path: Path) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    chats(shelf)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [policy], clock)
    returns = policy.follower.book.learning.returns
    assert returns > 50
    after = restored(tmp_path, shelf, clock)
    assert isinstance(after, ChainHazard)
    book = after.follower.book
    assert (book.learning.requests, book.learning.returns) == (policy.follower.book.learning.requests, returns)
    assert after.follower.unknown == policy.follower.unknown
    rows = shelf.residency.find_keys(0, map(key, range(100, 130)))
    former = policy.follower.book
    turn = former.chains.turn[former.owner[rows[-1]]]
    assert turn > 2 and book.chains.turn[book.owner[rows[-1]]] == turn
    shelf.now_ns += NS_PER_S
    shelf.chain(*range(100, 100 + len(rows) + 1))
    assert book.chains.turn[book.owner[rows[-1]]] == turn + 1


def test_what_was_stored_in_a_tier_that_is_empty_now_is_known_as_gone(tmp_path: Path) -> None:
    """The restart of a daemon whose memory did not outlive it."""
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    shelf.chain(1, 2, 3)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [policy], clock)
    after = restored(tmp_path, Shelf("host"), clock)
    assert all(knows(after, 0, number) for number in (1, 2, 3))
    assert isinstance(after, ChainHazard) and not len(after) and after.follower.guard.capacity == 0


def test_times_are_of_the_clock_that_is_running(tmp_path: Path) -> None:
    """The machine has started anew: its clock is younger than the last use."""
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    shelf.now_ns = 5000 * NS_PER_S
    shelf.chain(1, 2, 3)
    before = ManualClock(5010 * NS_PER_S)
    saved(tmp_path, shelf, [policy], before)
    after = restored(tmp_path, shelf, Rebooted(before.wall_ns() + 30 * NS_PER_S))
    assert isinstance(after, ChainHazard)
    assert after.follower.book.chains.used_s[0] == pytest.approx(3.0 - 40.0)


class Rebooted(ManualClock):
    """Three seconds after the machine started, at a time of the wall clock."""

    def __init__(self, wall_ns: int) -> None:
        super().__init__(3 * NS_PER_S)
        self._then_ns = wall_ns

    def wall_ns(self) -> int:
        return self._then_ns


def test_time_without_a_daemon_is_no_time_without_a_return() -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    shelf.now_ns = NS_PER_S
    chats(shelf, requests=40)
    after = chain_policy(shelf)
    after.import_state(exported(policy), Origin(np.arange(1), 0, shelf.now_ns + 3600 * NS_PER_S))
    before_bins, bins = (each.follower.book.chains.bin.tolist()[:12] for each in (policy, after))
    assert max(bins) > max(before_bins)
    seen = exported(after)["late"]["seen"].sum() if "late" in exported(after) else 0.0
    assert seen == (exported(policy)["late"]["seen"].sum() if "late" in exported(policy) else 0.0)


def test_a_tenant_that_nothing_is_known_of_is_left_out(tmp_path: Path) -> None:
    shelf = Shelf("host", tenants=2)
    policy = chain_policy(shelf)
    shelf.chain(1, 2, tenant=0)
    shelf.chain(3, 4, tenant=1)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [policy], clock)
    other = Shelf("host", tenants=0)
    assert other.residency.tenant("tenant-1") == 0
    after = restored(tmp_path, other, clock)
    assert knows(after, 0, 3) and knows(after, 0, 4) and not knows(after, 0, 1)
    assert len(other.residency.tenants) == 1


def test_why_blocks_went_is_known_and_how_often_they_had_been_used(tmp_path: Path) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    shelf.now_ns = 50 * NS_PER_S
    for _ in range(3):
        rows = shelf.chain(1, 2)
    shelf.residency.remove(rows[1], Cause.EXPIRED, shelf.now_ns)
    saved(tmp_path, shelf, [policy], ManualClock(60 * NS_PER_S))
    other = Shelf("host")
    restored(tmp_path, other, ManualClock(60 * NS_PER_S))
    absence = other.residency.why_missing(0, key(2))
    assert (absence.cause, absence.accesses) == (Cause.EXPIRED, 3)
    assert absence.at_ns == pytest.approx(50 * NS_PER_S, abs=2 * 2**20)
    other.store(2)
    assert other.residency.accesses(other.residency.find(0, key(2))) == 3, "so that admission sees a second touch"


def test_a_deleted_block_is_not_in_the_next_file(tmp_path: Path) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    chats(shelf)
    clock = ManualClock(shelf.now_ns)
    stored = [number for number in range(20) if shelf.residency.find(0, key(number)) >= 0]
    shelf.residency.remove(shelf.residency.find(0, key(stored[-1])), Cause.EVICTED, shelf.now_ns)
    gone, kept = stored[-2], stored[0]
    content = saved(tmp_path, shelf, [policy], clock)
    assert all(key(number) in content for number in stored)
    shelf.residency.remove(shelf.residency.find(0, key(gone)), Cause.DROPPED, shelf.now_ns)
    shelf.residency.forget(0, [key(stored[-1])])  # deleted after it had been evicted
    content = saved(tmp_path, shelf, [policy], clock)
    assert key(gone) not in content and key(stored[-1]) not in content and key(kept) in content
    assert shelf.residency.why_missing(0, key(gone)).cause is Cause.DROPPED, "as long as the daemon lives"


def test_what_had_left_of_a_tenant_is_forgotten_with_it(tmp_path: Path) -> None:
    shelf = Shelf("host", tenants=2)
    policy = chain_policy(shelf)
    for tenant in (0, 1):
        rows = shelf.chain(*range(tenant * 10 + 5, tenant * 10 + 9), tenant=tenant)
        shelf.residency.remove(rows[-1], Cause.EVICTED, shelf.now_ns)
    shelf.residency.forget(0, None)
    content = saved(tmp_path, shelf, [policy], ManualClock(shelf.now_ns))
    assert key(8) not in content and key(18) in content


def test_another_policy_begins_anew_with_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    shelf.chain(1, 2, 3)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [policy], clock)
    assert len(restored(tmp_path, shelf, clock, "lfu-ttl")) == 3
    assert caplog.messages == ["host: what chain-hazard learned is not used: lfu-ttl cannot use it"]


def version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_state, "FORMAT", chain_state.FORMAT + 1)


@pytest.mark.parametrize(
    "spoil", each_nth(["signature", "follower", "book", "learning", "guard", "rows", "evidence", "cells"], 2)
)
def test_a_state_that_does_not_fit_changes_nothing(spoil: str) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    chats(shelf)
    state = exported(policy)
    state[spoil] = state[spoil][:1] if spoil != "rows" else np.zeros(3)
    after = chain_policy(shelf)
    follower = after.follower
    with pytest.raises(ValueError):
        carried(state, after, shelf.now_ns)
    assert after.follower is follower and len(after) == len(policy)
    chats(shelf, first=5000, requests=30)
    assert after.next_victim(shelf.now_ns) >= 0


def test_a_state_of_another_version_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    chats(shelf)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [policy], clock)
    version(monkeypatch)
    after = restored(tmp_path, shelf, clock)
    assert isinstance(after, ChainHazard) and not after.follower.book.learning.requests and len(after) == len(policy)
    assert "another version" in caplog.text and len(caplog.records) == 1


@pytest.mark.parametrize("contents", [b'{"format": 99, "pieces": {}}', b'{"pieces": {}}', b"["])
def test_what_another_version_saved_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, contents: bytes
) -> None:
    shelf = Shelf("host")
    shelf.chain(1, 2)
    clock = ManualClock(shelf.now_ns)
    saved(tmp_path, shelf, [chain_policy(shelf)], clock)
    entries = dict(learning.kept(tmp_path))
    entries[CONTENTS + PIECE.pack(0)] = packed(np.frombuffer(contents, np.uint8))
    (tmp_path / learning.FILE).write_bytes(pickle.dumps(list(entries.items())))
    after = restored(tmp_path, shelf, clock)
    assert isinstance(after, ChainHazard) and not after.follower.book.learning.requests
    assert "another version" in caplog.text and len(caplog.records) == 1


def test_chains_that_were_torn_while_they_were_copied_are_unknown() -> None:
    """A number of a chain that went was given to another one between two pieces."""
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    first, second = shelf.chain(1, 2, 3), shelf.chain(11, 12, 13)
    state = exported(policy)
    state["rows"]["packed"] = state["rows"]["packed"][0]
    after = chain_policy(shelf)
    carried(state, after, shelf.now_ns)
    assert after.follower.unknown == 6
    assert {after.follower.book.owner[row] for row in first + second} == {chain_state.UNKNOWN}
    assert after.next_victim(shelf.now_ns) in (first[-1], second[-1])


def test_pieces_are_small_however_much_the_tier_holds() -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    for first in range(0, 20000, 20):
        shelf.chain(*range(first, first + 20))
    sizes = [(name, len(piece)) for name, piece in policy.export_state()]
    assert max(size for name, size in sizes if name in ("rows", "young", "old")) <= 2048
    assert sum(size for name, size in sizes if name == "rows") == 20000


def test_events_between_two_pieces_do_no_harm() -> None:
    shelf = Shelf("host")
    policy = chain_policy(shelf)
    chats(shelf)
    pieces = []
    for number, piece in enumerate(policy.export_state()):
        pieces.append(piece)
        chats(shelf, first=number * 10_000, requests=12)
    after = chain_policy(shelf)
    carried(joined(pieces), after, shelf.now_ns)
    assert after.follower.book.learning.requests >= 300 and len(after) == len(policy)
    while (row := after.next_victim(shelf.now_ns)) >= 0:
        shelf.residency.remove(row, Cause.EVICTED, shelf.now_ns)
    assert not len(after)


def test_a_policy_with_other_settings_goes_on() -> None:
    shelf = Shelf("host")
    former = chain_policy(shelf)
    chats(shelf)
    policy = create(NAME, shelf.residency, 0)
    succeed(policy, former, shelf.now_ns)
    assert (
        isinstance(policy, ChainHazard)
        and policy.follower.book.learning.requests == former.follower.book.learning.requests
    )
    other = create("lru", shelf.residency, 0)
    succeed(other, policy, shelf.now_ns)
    assert len(other) == len(policy)


@pytest.mark.parametrize("name", sorted(set(POLICIES) - {NAME}))
def test_policies_that_keep_nothing_do_not_learn(name: str) -> None:
    assert not isinstance(create(name, Shelf("host").residency, 0), Learns)
