"""The table of a copy's life."""

import itertools

import pytest

from kvstore_proto.v1 import kvstore_pb2 as pb
from kvstored.lifecycle import (
    CAUSE_OF_LOSS,
    STEPS,
    TRANSITIONS,
    Cause,
    CopyState,
    Move,
    Step,
    advance,
    miss_reason,
)


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


@pytest.mark.parametrize("move", Move)
def test_moves_are_legal_walks(move: Move) -> None:
    taken_from, made = STEPS[move]
    state = CopyState.RESIDENT
    for step in taken_from:
        state = advance(state, step)
    assert state is (CopyState.RESIDENT if move is Move.PROMOTE else CopyState.ABSENT)
    state = CopyState.ABSENT
    for step in made:
        state = advance(state, step)
    assert state is (CopyState.RESIDENT if made else CopyState.ABSENT)
    assert (move in CAUSE_OF_LOSS) is (move not in (Move.PROMOTE, Move.DEMOTE))


def test_causes_are_the_wire_s_miss_reasons() -> None:
    wire = {name: number for name, number in pb.MissReason.items() if number}
    assert wire == {f"MISS_REASON_{cause.name}": int(cause) for cause in Cause}
    assert all(miss_reason(cause) == cause for cause in Cause)
