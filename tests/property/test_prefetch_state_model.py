"""Any requests, hints and deletions: a restart keeps all guesses, by the new numbers of tenants, and no deleted key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_predictor.base import Array, Hint, Predictor, PredictorRequest
from kvstore_predictor.ensemble import Ensemble
from kvstore_predictor.markov import Markov
from kvstore_predictor.session_return import SessionReturn
from kvstored.clock import NS_PER_S
from kvstored.store.policies import Origin
from kvstored.store.prefetch.credit import PrefetchCredit
from kvstored.store.prefetch.guarded_predictor import GuardedPredictor, PrefetchState
from kvstored.store.prefetch.on_hint import OnHint
from kvstored.store.prefetch.recent import RecentRequests
from kvstored.telemetry import Counters

TENANTS, GONE = 3, 1
NOW_NUMBERS = np.array([5, -1, 0])  # tenant 1 is gone
LATER_S = 40.0
event = st.tuples(
    st.sampled_from(["request", "request", "request", "hint", "delete", "drop"]),
    st.integers(0, TENANTS - 1), st.integers(0, 3), st.integers(1, 6), st.floats(0.0, 20.0),
)  # fmt: skip


def key(tenant: int, session: int, block: int) -> bytes:
    return bytes([tenant, session, block]) + b"a key of 13 b"


def drive(predictor: Predictor, events: list[tuple[str, int, int, int, float]]) -> tuple[float, set[bytes]]:
    """The time of the last event, and the keys that are deleted."""
    now_s, deleted = 50.0, set[bytes]()
    for what, tenant, session, blocks, pause_s in events:
        now_s += pause_s
        keys = [key(tenant, session, block) for block in range(blocks)]
        if what == "request":
            predictor.requested(PredictorRequest(tenant, keys), now_s)
            deleted.difference_update(keys)
        elif what == "hint":
            predictor.hinted(tenant, keys[-1], Hint(due_s=now_s + 10.0), now_s)
            deleted.discard(keys[-1])
        elif what == "delete":
            predictor.forget(tenant, [keys[-1]])
            deleted.add(keys[-1])
        else:
            predictor.forget(tenant, None)
            deleted.update(key(tenant, each, block) for each in range(4) for block in range(6))
    return now_s, deleted


def state_of(predictor: Predictor) -> dict[str, Array]:
    learner = PrefetchState(GuardedPredictor(predictor), RecentRequests(), PrefetchCredit(0.2, 0.5, 1, Counters()))
    pieces: dict[str, list[Array]] = {}
    for name, piece in learner.export_state():
        pieces.setdefault(name, []).append(piece.copy())
    return {name: np.concatenate(each) for name, each in pieces.items()}


@pytest.mark.slow
@pytest.mark.parametrize("make", [OnHint, SessionReturn, Markov, Ensemble])
@given(events=st.lists(event, min_size=1, max_size=40))
@settings(max_examples=10, deadline=None)
def test_guesses_outlive_the_process(
    make: Callable[[], Predictor], events: list[tuple[str, int, int, int, float]]
) -> None:
    before, after, again = make(), make(), make()
    now_s, deleted = drive(before, events)
    state = state_of(before)
    packed = b"".join(table.tobytes() for table in state.values())
    assert not any(each in packed for each in deleted)
    restore(after, state, NOW_NUMBERS, now_s)
    known = {each.key for each in before.guesses(now_s, 60.0, 1000) if each.tenant != GONE}
    found = {(each.tenant, each.key): each for each in after.guesses(now_s + LATER_S, 60.0, 1000)}
    assert {name for _, name in found} == known
    assert all(tenant == NOW_NUMBERS[name[0]] for tenant, name in found)
    restore(again, state_of(after), np.arange(6), now_s + LATER_S)
    for each in again.guesses(now_s + 2 * LATER_S, 60.0, 1000):
        other = found.pop((each.tenant, each.key))
        assert each.probability == pytest.approx(other.probability)
        assert each.due_s - LATER_S == pytest.approx(other.due_s)
    assert not found


def restore(predictor: Predictor, state: dict[str, Array], tenants: Array, before_s: float) -> None:
    """Restore as a process does whose clock is LATER_S ahead of the clock before."""
    learner = PrefetchState(GuardedPredictor(predictor), RecentRequests(), PrefetchCredit(0.2, 0.5, 1, Counters()))
    learner.import_state(state, Origin(tenants, round(LATER_S * NS_PER_S), round((before_s + LATER_S) * NS_PER_S)))
