"""The hazard tables of chain-hazard by themselves: age bins, ranks made of chances, classes and who is believed."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_predictor import hazards
from kvstore_predictor.ages import (
    BINS,
    EDGES_S,
    WIDTHS_S,
    bins_of,
    fading,
    leaning,
    passed,
    passed_by,
    places_of,
)
from kvstore_predictor.estimates import estimated, native, ranks, shrunk
from kvstore_predictor.features import Features, continued
from kvstore_predictor.hazards import HazardTables
from kvstore_predictor.ladders import Ladder
from kvstore_predictor.learning import Learner
from kvstore_predictor.sessions import AwaitedReturns
from tests.reference.skips import skip_without_compiler


def cell_features(turn: int) -> Features:
    return continued(1, 5, turn, 1.0, 1.0, None)


def test_a_rank_looks_at_the_best_horizon() -> None:
    late = np.full((1, BINS), 1e-6)
    late[0, 10] = 0.9  # returns after some 25 s, hardly before
    soon = np.full((1, BINS), 1e-6)
    soon[0, 0] = 0.01
    found = ranks(np.concatenate([late, soon]))
    assert found[0, 0] == pytest.approx(0.9 / EDGES_S[11], rel=0.2)
    assert found[0, 10] > found[0, 0] > found[1, 0]
    assert found[0, 11] < 1e-4, "the chance has passed"


def test_bins_of_ages() -> None:
    ages = np.array([0.0, 0.74, 0.75, 1e9])
    assert bins_of(ages).tolist() == [0, 0, 1, BINS - 1]
    ages = np.array([0.0, 0.74, 0.75, EDGES_S[-1] * 1.9, EDGES_S[-1] * 2.1, 1e9])
    assert passed_by(ages).tolist() == [passed(age) for age in ages.tolist()] == [0, 0, 1, BINS - 1, BINS, BINS]


def test_a_rank_goes_on_evenly_through_a_narrow_bin() -> None:
    bins, share = places_of(np.array([0.0, EDGES_S[5] + 0.25 * WIDTHS_S[5], EDGES_S[20] + 0.9 * WIDTHS_S[20]]))
    assert bins.tolist() == [0, 5, 20]
    assert share.tolist() == pytest.approx([0.0, 0.25, 0.0])
    tables = HazardTables([Ladder(())])
    cell = np.array([tables.cell(cell_features(1))] * 3)
    begin, between, end = tables.ranks(cell, np.array([EDGES_S[5], EDGES_S[5] + 0.25 * WIDTHS_S[5], EDGES_S[6]]))
    assert begin != end
    assert between == pytest.approx(0.75 * begin + 0.25 * end)


def test_beyond_the_last_bin_a_rank_falls_with_age() -> None:
    assert fading(np.array([0.0, 1.0, 2.0, 8.0]) * EDGES_S[-1]).tolist() == [1.0, 1.0, 0.5, 0.125]


def test_the_ladder_that_foretells_better_is_believed() -> None:
    tables = HazardTables([Ladder(("kind", "turn")), Ladder(("kind",))])
    cells = [tables.cell(cell_features(turn)) for turn in (1, 9)]
    for round_ in range(400):
        for cell, comes_back in zip(cells, (True, False), strict=True):
            if comes_back:
                tables.returned(cell, 3)
            else:
                tables.passed(cell, 0, 12)
        if round_ % 25 == 0:
            while tables.fold():
                pass
            tables.renew(1.0)
            tables.want(np.array(cells, dtype=np.int32))
            while tables.make():
                pass
    fine, coarse = tables.weights()
    assert fine > 0.9 > coarse
    first, second = tables.ranks(np.array(cells), np.zeros(2))
    assert first > 10 * second


def test_cells_that_no_chain_is_of_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "_CELLS_MAX", 64)
    monkeypatch.setattr(hazards, "_COARSE_MAX", 16)
    tables = HazardTables([Ladder(("kind", "length", "turn"))])

    def many(first: int, **features: int) -> list[int]:
        return [
            tables.cell(cell_features(1)._replace(length=length, turn=turn, **features))
            for length in range(first, first + 8)
            for turn in range(1, 10)
        ]

    kept = tables.cell(cell_features(9))
    cells = many(0)
    assert len(set(cells)) < len(cells), "more than there are"
    coarse = tables.cell(cell_features(9)._replace(length=70, pace=3, chance=5))
    assert tables.cell(cell_features(9)._replace(length=70, pace=0)) == coarse, "a hint and the pace go first"
    assert max(many(20, chance=2)) < 64
    for _ in range(6):
        tables.in_use(np.array([kept], dtype=np.int32))
        while tables.fold():
            pass
        tables.renew(1.0)
        while tables.make():
            pass
    again = many(40)
    assert len(set(again[:40])) == 40, "room for new ones"
    assert tables.cell(cell_features(9)) == kept, "a chain is of it"
    assert kept not in again


def learned(tables: HazardTables) -> None:
    while tables.fold():
        pass
    tables.renew(1.0)
    tables.want(np.arange(3, dtype=np.int32))
    while tables.make():
        pass


def test_one_return_in_a_narrow_bin_is_chance() -> None:
    """Of 60 chains of a class one returned where one in a thousand does: the estimate stays near the coarser step's."""
    exposed, events = np.zeros((2, 6, 1, 1, BINS))
    exposed[0], events[0] = 10_000.0, 10.0
    exposed[1], events[1] = 60.0, 1.0
    assert np.all(shrunk(exposed, events, 1.0) < 0.003)
    exposed[1], events[1] = 60_000.0, 1_000.0
    assert shrunk(exposed, events, 1.0) == pytest.approx(1 / 60, rel=0.03)


def test_where_ages_alone_foretell_the_order_leans_to_the_last_use() -> None:
    tables = HazardTables([Ladder(("turn",)), Ladder(())])
    assert tables.lean == 0.0
    assert tables.weights()[1] < 0.25, "it has to show first that it foretells better"
    tables.evidence[:] = 0.0, 200.0
    learned(tables)
    assert tables.lean > 1.0 and tables.evidence[0] == tables.evidence[1] - 120.0
    early, late = leaning(np.array([0.0, 90.0]), tables.lean)
    assert early == 1.0 > 0.1 > late
    tables.evidence[:] = 50.0, 0.0
    learned(tables)
    assert tables.lean == 0.0


def test_ages_alone_are_forgotten_faster() -> None:
    tables = HazardTables([Ladder(("turn",)), Ladder(())])
    tables.passed(tables.cell(cell_features(1)), 0, 2)
    while tables.fold():
        pass
    tables.renew(0.99)
    slow, fast = (ladder.counts[()][0][0] for ladder in tables.counts())
    assert slow == pytest.approx(0.99) and fast == pytest.approx(0.99**10)


@pytest.mark.parametrize("ranked", [True, False])
def test_hazards_without_ranks_are_made_many_at_a_time(ranked: bool) -> None:
    learner = Learner(AwaitedReturns(1), [Ladder(("kind", "turn", "gap", "text"))], ranked=ranked)
    tables = learner.tables
    for text in range(80):
        before = tables.are_many_asked
        cell = tables.cell(cell_features(text % 10)._replace(gap=text % 13, text=text % 12))
        assert len(tables.hazards([cell])) == 1, "one that waits is estimated when it is asked for"
        if tables.are_many_asked and not before:
            assert text + 1 == (16 if ranked else 64)
    asked = len(tables._asked)
    assert learner.step(0.0, 120.0)
    assert asked - len(tables._asked) == (16 if ranked else 64)


@pytest.mark.parametrize("classes", [1, 7, 64])
@pytest.mark.parametrize("gain", [1.0, 1.37, 1e6])
def test_compiled_estimates_are_numpys_to_the_bit(classes: int, gain: float, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without_compiler()
    assert native.wait() is not None
    chance = np.random.default_rng(classes)
    counts = chance.exponential(3.0 * gain, (60, 2, BINS)) * (chance.random((60, 2, BINS)) < 0.5)
    counts[0] = 0.0  # the void node, which stands for what a ladder lacks
    paths = chance.integers(0, 60, (classes, 5, 6))
    weights = chance.dirichlet(np.ones(5))

    def made() -> list[bytes]:
        by_ladder, mixed = estimated(counts, paths, gain, weights)
        return [found.tobytes() for found in (by_ladder, mixed, np.abs(ranks(mixed)), np.abs(ranks(mixed[::2])))]

    compiled = made()
    monkeypatch.setattr(native, "library", None)
    assert made() == compiled
