"""The ghost against a naive one: the keys remembered last; of keys that went by order nothing is copied."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstored.lifecycle import BY_ORDER, Cause
from kvstored.store.blocks.ghost import Ghost
from tests.reference.blocks import key
from tests.reference.examples import examples

MS = 1 << 20
steps = st.lists(st.tuples(st.integers(0, 12), st.sampled_from([*Cause, None])), max_size=120)


@settings(max_examples=examples(200), deadline=None)
@given(limit=st.integers(0, 6), steps=steps)
def test_it_knows_the_keys_remembered_last(limit: int, steps: list[tuple[int, Cause | None]]) -> None:
    ghost, naive = Ghost(limit), dict[int, tuple[int, Cause]]()
    events = 0
    for number, cause in steps:
        if cause is None:
            ghost.drop(key(number))
            if number in naive:
                naive[number] = naive[number][0], by_order(naive[number][1])
        else:
            events += 1
            ghost.remember(key(number), cause, events * MS, number)
            if naive.pop(number, None) is None and len(naive) == limit > 0:
                naive.pop(min(naive, key=naive.__getitem__))
            if limit:
                naive[number] = events, cause
            naive = {each: seen for each, seen in naive.items() if seen[0] > events - 2 * limit}
        assert len(ghost) == len(naive) <= limit
        for each in range(13):
            absence = ghost.recall(key(each))
            assert (absence is None) == (each not in naive)
            if absence is not None:
                assert (absence.at_ns, absence.cause, absence.accesses) == (*at_and_cause(naive[each]), each)
    copy = Ghost(limit)
    for piece in ghost.copied():
        copy.restore(piece, 5 * MS)
    kept = {each: seen for each, seen in naive.items() if seen[1] not in BY_ORDER}
    assert len(copy) == len(kept)
    for each, seen in kept.items():
        absence = copy.recall(key(each))
        assert absence is not None and (absence.at_ns - 5 * MS, absence.cause) == at_and_cause(seen)
    ghost.drop_all()
    assert len(ghost) == len(naive) and not any(len(piece) for piece in ghost.copied())
    for each in naive:
        absence = ghost.recall(key(each))
        assert absence is not None and absence.cause is by_order(naive[each][1])


def by_order(cause: Cause) -> Cause:
    """Return the cause after a drop: a key that went by another order keeps it."""
    return cause if cause in BY_ORDER else Cause.DROPPED


def at_and_cause(seen: tuple[int, Cause]) -> tuple[int, Cause]:
    return seen[0] * MS, seen[1]
