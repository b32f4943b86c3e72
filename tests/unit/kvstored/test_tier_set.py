"""Sets of tiers agree with Python's sets of their positions, one by one and by columns."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstored.tier_set import ALL_TIERS, MAX_TIERS, MEMBERS, NO_TIERS, TIER_SETS, TierSet, holding, holding_any

SOME = [(), (0,), (1,), (0, 2), (1, 2, 7), tuple(range(MAX_TIERS))]


def test_a_set_has_its_members_the_fastest_first() -> None:
    for tiers in SOME:
        found = TierSet.of(*reversed(tiers), *tiers)
        assert list(found) == list(tiers) == list(MEMBERS[found])
        assert [tier in found for tier in range(MAX_TIERS)] == [tier in tiers for tier in range(MAX_TIERS)]
        assert len(found) == len(tiers) and bool(found) == bool(tiers)
        assert found.first == (tiers[0] if tiers else -1)
    assert list(NO_TIERS) == [] and list(ALL_TIERS) == list(range(MAX_TIERS))
    with pytest.raises(IndexError):
        TierSet.of(MAX_TIERS)


@pytest.mark.parametrize("one", SOME)
@pytest.mark.parametrize("other", SOME)
def test_sets_combine_as_sets_of_python(one: tuple[int, ...], other: tuple[int, ...]) -> None:
    ours, theirs = TierSet.of(*one), TierSet.of(*other)
    assert set(ours.union(theirs)) == {*one} | {*other}
    assert set(ours.difference(theirs)) == {*one} - {*other}
    assert bool(ours & theirs) == bool({*one} & {*other})
    for tier in other:
        assert set(ours.with_tier(tier)) == {*one, tier}
        assert set(ours.without(tier)) == {*one} - {tier}


def test_a_column_holds_sets_as_they_are() -> None:
    column = bytearray(len(SOME))
    for row, tiers in enumerate(SOME):
        column[row] = TierSet.of(*tiers)
    assert [tuple(TIER_SETS[mask]) for mask in column] == SOME


@pytest.mark.parametrize("kind", [np.uint8, np.uint64])
def test_columns_are_asked_row_by_row(kind: type) -> None:
    column: npt.NDArray[Any] = np.array([TierSet.of(*tiers) for tiers in SOME], kind)
    for tier in range(MAX_TIERS):
        assert holding(column, tier).tolist() == [tier in tiers for tiers in SOME]
    assert holding_any(column, TierSet.of(1, 2)).tolist() == [not {1, 2}.isdisjoint(tiers) for tiers in SOME]
