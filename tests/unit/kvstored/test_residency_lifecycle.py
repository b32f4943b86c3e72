"""The table of a copy's life."""

import itertools

import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.clients.codes import miss_reason
from kvstored.lifecycle import TRANSITIONS, Cause, CopyState, Step, advance


@pytest.mark.parametrize(("state", "step"), list(itertools.product(CopyState, Step)))
def test_only_what_the_table_holds_is_legal(state: CopyState, step: Step) -> None:
    after = TRANSITIONS.get((state, step))
    if after is None:
        with pytest.raises(RuntimeError, match=f"{step.name} while {state.name}"):
            advance(state, step)
    else:
        assert advance(state, step) is after


def test_every_state_can_be_reached_and_left() -> None:
    reached, frontier = {CopyState.ABSENT}, [CopyState.ABSENT]
    while frontier:
        state = frontier.pop()
        for (before, _), after in TRANSITIONS.items():
            if before == state and after not in reached:
                reached.add(after)
                frontier.append(after)
    assert reached == set(CopyState)
    assert {before for before, _ in TRANSITIONS} == set(CopyState)


def test_causes_are_the_wire_s_miss_reasons() -> None:
    wire = {name: number for name, number in pb.MissReason.items() if number}
    assert wire == {f"MISS_REASON_{cause.name}": int(cause) for cause in Cause}
    assert all(miss_reason(cause) == cause for cause in Cause)
