"""The file that outlives the daemon brings back what prefetch by prediction learned, but what was deleted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore_predictor.base import Hint, Predictor, PredictorRequest
from kvstore_predictor.ensemble import Ensemble
from kvstore_predictor.markov import Markov
from kvstore_predictor.session_return import SessionReturn
from kvstored.clock import NS_PER_S, ManualClock
from kvstored.store.policies import Origin
from kvstored.store.prefetch.credit import Held, PrefetchCredit, Standing
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState
from kvstored.store.prefetch.on_hint import OnHint
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.telemetry import Counters
from tests.contract.test_predictor_contract import ask, drive, key, state_of
from tests.reference import learning
from tests.reference.blocks import Shelf
from tests.reference.examples import quick_are
from tests.reference.learning import learned_of

PREDICTORS: list[Callable[[], Predictor]] = [OnHint, SessionReturn, Markov, Ensemble]
TENANTS = ("alice", "bob", "carol")
NOW_S = 2000.0


class Learner:
    """One store's prefetch, as far as it learns."""

    def __init__(self, predictor: Predictor | None) -> None:
        self.predictor = predictor
        self.guarded, self.recent = GuardedPredictor(predictor), RecentRequests()
        self.credit = PrefetchCredit(0.2, 0.5, 1 << 40, Counters())
        self.state = PrefetchState(self.guarded, self.recent, self.credit)

    def waste(self, tenant: int, blocks: int, now_s: float) -> None:
        for number in range(blocks):
            name = key(tenant, 1 << 20, number)
            self.credit.brought(tenant, name, Held(b"chain", 1000, 0.5, now_s, (), 0.9), now_s + 60)
            self.credit.wasted(tenant, name, now_s, is_evicted=False)


def shelf_of(*tenants: str) -> Shelf:
    shelf = Shelf("host", tenants=0)
    for name in tenants:
        shelf.residency.tenant(name)
    return shelf


def number_of(shelf: Shelf, name: str) -> int:
    return shelf.residency.tenant(name)


def keep(tmp_path: Path, shelf: Shelf, learner: Learner, clock: ManualClock) -> bytes:
    """All that is saved."""
    return learning.keep(tmp_path, learned_of(shelf.residency, clock, prefetch=learner.state)[0])


def go_on(tmp_path: Path, shelf: Shelf, learner: Learner, clock: ManualClock) -> None:
    learned, _ = learned_of(shelf.residency, clock, prefetch=learner.state)
    learned.read(learning.kept(tmp_path), ())
    learning.hand_out(learned, renew=False)


def taught(make: Callable[[], Predictor], shelf: Shelf) -> tuple[Learner, float]:
    """Teach by requests and hints of all tenants; return the time of the last."""
    learner = Learner(make())
    assert learner.predictor is not None
    now_s = drive(learner.predictor)
    for _ in range(40):
        for tenant in range(3):
            keys = [key(tenant, 99, block) for block in range(4)]
            learner.predictor.requested(PredictorRequest(tenant, keys), now_s)
            learner.predictor.hinted(tenant, keys[-1], Hint(due_s=now_s + 10.0), now_s)
            now_s += 3.0 + 0.5 * tenant
    learner.predictor.requested(PredictorRequest(1, [key(1, 98, 0), key(1, 98, 1)]), now_s)
    return learner, now_s


@pytest.mark.parametrize("make", PREDICTORS)
def test_guesses_are_the_same_after_a_restart_as_before(tmp_path: Path, make: Callable[[], Predictor]) -> None:
    """Tenants by their new numbers. What was learned since the last renewal counts at once after a restart, so that a
    second one changes nothing."""
    before, now_s = taught(make, shelf_of(*TENANTS))
    clock = ManualClock(round(now_s * NS_PER_S))
    keep(tmp_path, shelf_of(*TENANTS), before, clock)
    after, again = Learner(make()), Learner(make())
    turned = shelf_of(*reversed(TENANTS))
    go_on(tmp_path, turned, after, clock)
    keep(tmp_path, turned, after, clock)
    go_on(tmp_path, shelf_of(*TENANTS), again, clock)
    learners = (before.predictor, after.predictor, again.predictor)
    known, turned_round, found = (
        {(each.tenant, each.key): each for each in ask(predictor, now_s)} for predictor in learners if predictor
    )
    assert len(known) >= 3 and set(found) == set(known)
    assert set(turned_round) == {(2 - tenant, name) for tenant, name in known}
    for (tenant, name), each in found.items():
        other = turned_round[2 - tenant, name]
        assert each.probability == pytest.approx(other.probability, rel=1e-9)
        assert each.due_s == pytest.approx(other.due_s)
        assert each.blocks == known[tenant, name].blocks
    assert np.mean([abs(each.probability - known[name].probability) for name, each in found.items()]) < 0.1


@pytest.mark.parametrize("make", PREDICTORS)
def test_a_tenant_that_is_gone_is_left_out(tmp_path: Path, make: Callable[[], Predictor]) -> None:
    before, now_s = taught(make, shelf_of(*TENANTS))
    clock = ManualClock(round(now_s * NS_PER_S))
    keep(tmp_path, shelf_of(*TENANTS), before, clock)
    after = Learner(make())
    go_on(tmp_path, shelf_of("carol", "dave"), after, clock)
    assert after.predictor is not None
    guesses = ask(after.predictor, now_s)
    assert guesses and {each.tenant for each in guesses} == {0} and {each.key[3] for each in guesses} == {2}
    packed = b"".join(each.tobytes() for each in state_of(after.predictor).values())
    assert key(0, 0, 0)[:4] not in packed and key(1, 0, 0)[:4] not in packed


@pytest.mark.parametrize("make", PREDICTORS)
def test_no_deleted_key_is_in_the_file(tmp_path: Path, make: Callable[[], Predictor]) -> None:
    shelf = shelf_of(*TENANTS)
    learner, now_s = taught(make, shelf)
    assert learner.predictor is not None
    keys = [key(2, 97, block) for block in range(4)]
    learner.recent.got(2, 1, keys, 0, round(now_s * NS_PER_S))
    learner.recent.put(2, [*keys[1:], key(2, 97, 4)], keys[0], round(now_s * NS_PER_S))
    clock = ManualClock(round(now_s * NS_PER_S))
    assert key(2, 97, 4) in keep(tmp_path, shelf, learner, clock)
    learner.recent.forget(2, [key(2, 97, 4)])
    learner.predictor.forget(1, None)
    content = keep(tmp_path, shelf, learner, clock)
    assert key(2, 97, 4) not in content and key(1, 0, 0)[:8] not in content
    assert key(0, 0, 0)[:4] in content or make is OnHint


def test_an_announcement_after_the_last_request_is_kept(tmp_path: Path) -> None:
    shelf, learner, clock = shelf_of(*TENANTS), Learner(OnHint()), ManualClock(round(NOW_S * NS_PER_S))
    saving, _ = learned_of(shelf.residency, clock, prefetch=learner.state)
    before = saving.activity()
    learner.guarded.hinted(0, key(0, 1, 0), Hint(due_s=NOW_S + 60.0), NOW_S)
    assert saving.activity() != before
    learning.keep(tmp_path, saving)
    after = Learner(OnHint())
    go_on(tmp_path, shelf_of(*TENANTS), after, clock)
    assert after.predictor is not None
    assert [each.key for each in ask(after.predictor, NOW_S + 50.0)] == [key(0, 1, 0)]


def test_a_tenant_that_was_turned_down_stays_so_as_long_as_it_would_have(tmp_path: Path) -> None:
    before, after, later = (Learner(Markov()) for _ in range(3))
    before.waste(1, 60, NOW_S)
    before.waste(0, 1, NOW_S)
    assert before.credit.statistics(1, 0).standing is Standing.OFF
    clock = ManualClock(round(NOW_S * NS_PER_S))
    keep(tmp_path, shelf_of("alice", "bob"), before, clock)
    go_on(tmp_path, shelf_of("bob", "alice"), after, clock)
    assert after.credit.statistics(0, 0).standing is Standing.OFF
    assert after.credit.statistics(1, 0).standing is Standing.FULL
    assert after.credit.statistics(0, 0).wasted_blocks == 0, "figures count from the start"
    for each, tenant in ((before, 1), (after, 0)):
        assert not each.credit.may_bring(tenant, 0.9, 1000, 0, NOW_S + 1)
    clock.advance(s=3600)
    go_on(tmp_path, shelf_of("alice", "bob"), later, clock)
    for each in (before, later):
        assert each.credit.may_bring(1, 0.9, 1000, 0, NOW_S + 3600)


def test_credit_is_copied_in_small_pieces() -> None:
    learner = Learner(Markov())
    for tenant in range(200):
        learner.waste(tenant, 1, NOW_S)
    pieces = list(learner.credit.pieces())
    assert max(map(len, pieces)) <= 64
    assert np.concatenate(pieces)["tenant"].tolist() == list(range(200))


def test_a_clock_that_began_anew_does_not_stop_time() -> None:
    """The machine has started anew, and its wall clock was set back."""
    before, after = Learner(Markov()), Learner(Markov())
    before.waste(0, 60, NOW_S)
    state = joined(before)
    after.state.import_state(state, Origin(np.arange(1), 5000 * NS_PER_S, 10 * NS_PER_S))
    assert not after.credit.may_bring(0, 0.9, 1000, 0, 10.0)
    assert after.credit.may_bring(0, 0.9, 1000, 0, 3610.0)


def joined(learner: Learner) -> dict[str, np.ndarray]:
    pieces: dict[str, list[np.ndarray]] = {}
    for name, piece in learner.state.export_state():
        pieces.setdefault(name, []).append(piece.copy())
    return {name: np.concatenate(each) for name, each in pieces.items()}


def test_the_deepest_block_of_a_request_is_known_after_a_restart() -> None:
    before, after = Learner(Markov()), Learner(Markov())
    keys = [key(0, 5, block) for block in range(6)]
    before.recent.got(0, 1, keys[:4], 2, 0)
    before.recent.put(0, keys[2:], keys[1], 1)
    after.state.import_state(joined(before), Origin(np.array([3]), 0, 10))
    assert after.recent.names(3, keys[3])[0] == keys[5]
    assert after.recent.names(0, keys[3]) == (keys[3],)


@pytest.mark.parametrize("make", quick_are(PREDICTORS, [False, False, False, True]))
def test_a_state_that_cannot_be_used_changes_nothing(make: Callable[[], Predictor]) -> None:
    before, now_s = taught(make, shelf_of(*TENANTS))
    state, origin = joined(before), Origin(np.arange(3), 0, round(now_s * NS_PER_S))
    assert before.predictor is not None
    known = ask(before.predictor, now_s)
    for name in state:
        lacking = {each: table for each, table in state.items() if each != name}
        odd = {**state, name: np.zeros((2, 2, 2, 2), np.int8)}
        for broken in (lacking, odd):
            try:
                before.state.import_state(broken, origin)
            except ValueError:
                assert before.guarded.works and ask(before.predictor, now_s) == known, name
            else:  # without this table there is less to go on from
                assert before.guarded.works, name
                before, _ = taught(make, shelf_of(*TENANTS))
                assert before.predictor is not None
    for broken in ({}, {**state, "credit": state["credit"][["tenant", "at_s"]]}):
        with pytest.raises(ValueError):
            before.state.import_state(broken, origin)
    with pytest.raises(ValueError, match="tenants"):
        before.state.import_state(state, Origin(np.arange(1), 0, 0))
    assert before.guarded.works and ask(before.predictor, now_s) == known


def test_another_predictor_begins_anew_and_none_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, now_s = taught(Markov, shelf_of(*TENANTS))
    clock = ManualClock(round(now_s * NS_PER_S))
    keep(tmp_path, shelf_of(*TENANTS), before, clock)
    other, none = Learner(SessionReturn()), Learner(None)
    go_on(tmp_path, shelf_of(*TENANTS), other, clock)
    assert other.predictor is not None and not ask(other.predictor, now_s)
    assert caplog.messages == ["prefetch: what markov learned is not used: session-return cannot use it"]
    caplog.clear()
    go_on(tmp_path, shelf_of(*TENANTS), none, clock)
    assert not caplog.messages, "it is off"
    content = keep(tmp_path, shelf_of(*TENANTS), none, clock)
    assert b":prefetch" not in content


class Failing(Markov):
    """Fails once it is asked for its state, after the first pieces of it."""

    def export_state(self):  # type: ignore[no-untyped-def]
        yield from list(super().export_state())[:2]
        raise RuntimeError("a mistake")


def test_a_predictor_that_fails_costs_no_file(tmp_path: Path) -> None:
    learner = Learner(Failing())
    clock = ManualClock(round(NOW_S * NS_PER_S))
    keep(tmp_path, shelf_of(*TENANTS), learner, clock)
    assert learner.guarded.failure == "RuntimeError: a mistake"
    after = Learner(Markov())
    go_on(tmp_path, shelf_of(*TENANTS), after, clock)
    assert after.guarded.works
