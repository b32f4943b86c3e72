"""Compiled code and NumPy teach chains the same, give them the same worths, to the bit, and choose the same ones."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_predictor.estimates import native
from kvstore_predictor.features import begun, continued, with_answer
from kvstore_predictor.hazards import HazardTables
from kvstore_predictor.ladders import Ladder
from kvstore_predictor.learning import Learner
from kvstore_predictor.sessions import AwaitedReturns
from kvstored.store.blocks import Residency
from kvstored.store.policies.chains.book import ChainBook
from kvstored.store.policies.chains.worths import least, worths
from tests.reference.examples import examples
from tests.reference.skips import skip_without_compiler

NOW_S, ROWS = 40_000.0, 500


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    skip_without_compiler()
    assert native.wait() is not None


def book_of(chance: np.random.Generator, slots: int, tenants: int, width: str, *, is_due: bool) -> ChainBook:
    """A book of `slots` chains with random columns, not all of which a request could have made."""
    residency = Residency(("host",))
    book = ChainBook(residency, [Ladder(("kind", "turn", "answer")), Ladder(())])
    book.grow(ROWS)
    residency.rows.depth = array(width, chance.integers(0, 300, ROWS).tolist())
    np.frombuffer(book.shared)[:] = chance.exponential(2.0, ROWS) * (chance.random(ROWS) < 0.2)
    np.frombuffer(book.shared_s)[:] = NOW_S - chance.exponential(100.0, ROWS)
    for _ in range(tenants):
        book.add_tenant()
    cells = [book.tables.cell(continued(1, 5, turn, 1.0, 1.0, None)) for turn in range(2, 12)]
    cells.append(book.tables.cell(begun(3, 9, None)))
    for cell in cells:
        book.tables.returned(cell, int(chance.integers(0, 20)))
    book.tables.fold()
    while book.tables.make():
        pass
    for _ in range(slots):
        book.chains.take()
    chains = book.chains
    chains.ints(chains.tail)[:] = chance.integers(-20, ROWS, slots)
    chains.flags(chains.blocked)[:] = chance.random(slots) < 0.1
    chains.flags(chains.live)[:] = chance.random(slots) < 0.9
    chains.ints(chains.tenant)[:] = chance.integers(0, tenants, slots)
    chains.ints(chains.cell)[:] = chance.choice(cells, slots)
    chains.ints(chains.length)[:] = chance.integers(1, 300, slots)
    chains.floats(chains.used_s)[:] = NOW_S + 1.0 - chance.exponential(5.0, slots) ** 4
    chains.longs(chains.order)[:] = chance.integers(0, slots, slots)
    chains.floats(chains.due_s)[:] = NOW_S * (is_due * chance.random(slots) < 0.01)
    chains.longs(chains.entry)[:] = 7
    return book


def found(book: ChainBook, begin: int, end: int, wanted: int) -> list[bytes]:
    chains = book.chains
    slots, worth = worths(book, 0, begin, end, NOW_S)
    seen = [slots.tobytes(), worth.tobytes()]
    slots, worth, orders, most = least(chains, slots, worth, wanted, 11)
    columns = (chains.longs(chains.entry), chains.floats(chains.base))
    return [*seen, *(each.tobytes() for each in (slots, worth, orders, *columns)), str(most).encode()]


@settings(max_examples=examples(150), deadline=None)
@given(
    st.integers(0, 2**32), st.integers(1, 400), st.integers(1, 2), st.sampled_from("HIQ"), st.integers(1, 90),
    st.booleans(), st.sampled_from([0.0, 0.3, 1.2]),
)  # fmt: skip
def test_worths_and_choice(
    seed: int, slots: int, tenants: int, width: str, wanted: int, is_due: bool, lean: float
) -> None:
    def seen() -> list[bytes]:
        chance = np.random.default_rng(seed)
        book = book_of(chance, slots, tenants, width, is_due=is_due)
        book.tables.lean = lean
        begin = int(chance.integers(0, slots))
        return found(book, begin, int(chance.integers(begin, slots + 1)), wanted)

    _same_without(seen)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.booleans())
def test_ranks_made_in_the_tables(seed: int, hint: int, is_ranked: bool) -> None:
    def seen() -> list[bytes]:
        chance = np.random.default_rng(seed)
        tables = HazardTables([Ladder(("kind", "turn", "gap")), Ladder(())], ranked=is_ranked)
        cells = []
        for turn in range(2, 12):
            features = continued(1, 5, turn, 2.0 * turn, 1.0, None)
            cells.append(tables.cell(features._replace(next_step=hint if turn == 5 else 0)))
            tables.passed(cells[-1], 0, int(chance.integers(0, 20)))
            tables.returned(cells[-1], int(chance.integers(0, 20)))
        tables.fold()
        while tables.make(4):
            pass
        at = np.array(cells)
        return [tables.hazards(at).tobytes(), tables.ranks(at, chance.exponential(50.0, len(at))).tobytes()]

    _same_without(seen)


@settings(max_examples=examples(50), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 60), st.booleans())
def test_what_chains_teach_in_steps(seed: int, slots: int, is_ranked: bool) -> None:
    """Chains grow older, return and get other classes, while renewals go on step by step."""

    def seen() -> list[bytes]:
        chance, chains = np.random.default_rng(seed), AwaitedReturns(slots)
        ladders = [Ladder(("kind", "turn", "answer")), Ladder(()), Ladder(("gap", "kind"))]
        learner, now_s = Learner(chains, ladders, ranked=is_ranked), 0.0
        for number in range(300):
            now_s += chance.exponential(1.0)
            slot = int(chance.integers(0, slots))
            if chains.live[slot]:
                learner.returned(slot, now_s - chains.used_s[slot])
            features = continued(1, 5, int(chance.integers(2, 12)), now_s % 9.0, 1.0, None)
            known = with_answer(features, 40) if number % 3 else features
            chains.cell[slot], chains.bin[slot], chains.used_s[slot] = learner.tables.cell(known), 0, now_s
            chains.live[slot] = number % 5 > 0
            learner.requests += 1
            learner.step(now_s, float(chance.choice([60.0, 120.0, 500.0])))
        state: dict[str, list[bytes]] = {}
        for name, piece in learner.tables.copied():
            state.setdefault(name, []).append(piece.tobytes())
        assert learner.renewed > 100
        hazards = learner.tables.hazards(np.frombuffer(chains.cell, np.int32).astype(np.int64))
        return [hazards.tobytes(), chains.bin.tobytes(), *(b"".join(state[name]) for name in sorted(state))]

    _same_without(seen)


def _same_without(seen: Callable[[], list[bytes]]) -> None:
    by_library = seen()
    with patch.object(native, "library", None):
        assert seen() == by_library
