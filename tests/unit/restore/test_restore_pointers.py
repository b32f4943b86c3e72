"""Computing goes up, loading goes down, and every chunk is present in the end, whatever becomes of the loads."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from kvstore_restore.pointers import ChunkState, Pointers, turn


def test_the_two_meet() -> None:
    pointers = Pointers(4)
    assert pointers.computable(1) == range(1) and pointers.stored() == [0, 1, 2, 3]
    assert pointers.loaded_chunk(3)
    assert pointers.computed_chunk(0)
    assert pointers.computable(1) == range(1, 2) and pointers.computable(9) == range(1, 3)
    assert pointers.loaded_chunk(2)
    assert not pointers.is_done and pointers.stored() == [1] and pointers.stored(2) == []
    assert pointers.computed_chunk(1)
    assert pointers.is_done and not pointers.computable(1)
    assert (pointers.computed, pointers.loaded, pointers.wasted) == (2, 2, 0)


def test_the_last_chunk_under_load_is_computed_as_well_and_counts_once() -> None:
    pointers = Pointers(1)
    assert pointers.computed_chunk(0)
    assert pointers.is_done
    assert not pointers.loaded_chunk(0)
    assert (pointers.computed, pointers.loaded, pointers.wasted) == (1, 0, 1)


def test_computing_leaves_a_chunk_that_it_cannot_overtake_to_the_load() -> None:
    pointers = Pointers(1, overtakes=lambda chunk: False)
    assert not pointers.computable(1)
    pointers.lose(0)  # it stalls
    assert pointers.state(0) is ChunkState.LOST
    assert pointers.computable(1)


def test_what_cannot_be_loaded_is_computed() -> None:
    lost, computes = Pointers(3, overtakes=lambda chunk: False), Pointers(3, loads=False)
    assert not lost.computable(3)
    lost.lose_all()
    assert lost.computable(3) == computes.computable(3) == range(3) and lost.stored() == computes.stored() == []


def test_what_is_cancelled_does_nothing_more() -> None:
    pointers = Pointers(3)
    pointers.cancel()
    assert pointers.is_done
    assert not pointers.stored() and not pointers.computable(1)
    assert not pointers.computed_chunk(0)
    assert pointers.wasted == 0


@given(st.integers(0, 12), st.integers(0, 1 << 30))
def test_every_chunk_is_present_once_whatever_becomes_of_the_loads(chunks: int, seed: int) -> None:
    random = Random(seed)
    pointers = Pointers(chunks, overtakes=lambda chunk: random.random() < 0.5)
    computing: range = range(0)
    counted: list[int] = []
    for _ in range(2000):
        if pointers.is_done:
            break
        what, stored = random.randrange(4), pointers.stored()
        if what == 0 and not computing:
            computing = pointers.computable(1)
            assert not computing or computing.start == pointers.head
        elif what == 1 and computing:
            counted += [computing.start] * pointers.computed_chunk(computing.start)
            computing = range(0)
        elif what == 2 and stored:
            counted += [stored[-1]] * pointers.loaded_chunk(stored[-1])
        elif what == 3 and stored:
            pointers.lose(random.choice(stored))
    assert pointers.is_done
    assert sorted(counted) == list(range(chunks))
    assert pointers.computed + pointers.loaded == chunks


def test_the_shortest_is_first_and_waiting_counts() -> None:
    assert turn(2, 1.0) < turn(10, 1.0) < turn(30, 1.0)
    assert turn(10, 2.0) < turn(2, 1.0), "a second of waiting counts for 16 chunks"
