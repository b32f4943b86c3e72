"""Each stage restores its own layers, and every chunk of every stage is present in the end, whatever is missing."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_restore.pointers import ChunkState, Pointers
from kvstore_restore.stages import Input, Stages


def _stages(count: int, chunks: int, *, loads: bool = False, inputs: bool = True) -> Stages:
    return Stages([Pointers(chunks, loads=loads) for _ in range(count)], [[inputs] * chunks] * (count - 1))


def test_a_stage_with_stored_states_does_not_wait_for_the_one_before() -> None:
    stages = _stages(2, 3)
    assert stages.next_compute(0) == 0
    assert stages.next_compute(1) is None  # its input is not loaded yet
    assert stages.input(1, 0) is stages.input(1, 1) is Input.STORED
    assert stages.loaded_input(1, 0)
    assert stages.next_compute(1) == 0 and stages.computing(1) == 0
    assert stages.next_compute(1) is None
    assert not stages.computed(1, 0)
    assert stages.loaded_input(1, 1) and stages.next_compute(1) == 1
    assert not stages.computed(0, 0)  # the second stage is past that chunk


def test_states_that_are_not_stored_come_from_the_stage_before() -> None:
    stages = _stages(2, 2, inputs=False)
    assert stages.next_compute(1) is None and stages.input(1, 0) is Input.MISSING
    assert stages.next_compute(0) == 0
    assert stages.computed(0, 0)
    assert (stages.next_compute(0), stages.next_compute(1)) == (1, 0)


def test_a_chunk_that_was_loaded_is_computed_again_for_the_next_stage_alone() -> None:
    """The first stage has loaded everything; the second lost its K/V and the states of both chunks."""
    stages = _stages(2, 2, loads=True)
    first, second = stages.pointers
    for chunk in (0, 1):
        assert first.loaded_chunk(chunk)
        second.lose(chunk)
        stages.lose_input(1, chunk)
    assert first.is_done and not stages.is_done
    for chunk in (0, 1):
        assert stages.next_compute(1) is None
        assert stages.next_compute(0) == chunk
        assert stages.next_compute(0) is None
        assert stages.computed(0, chunk)
        assert stages.next_compute(1) == chunk
        stages.computed(1, chunk)
    assert stages.is_done and stages.forwarded == 2
    assert (first.computed, first.loaded, first.wasted, second.computed) == (0, 2, 0, 2)


def test_nothing_is_computed_for_the_next_stage_before_its_own_chunks_are_there() -> None:
    """The second stage has chunk 0 and lacks the states of chunk 1; the first one's link is to bring its chunks."""
    first = Pointers(2, overtakes=lambda chunk: False)
    second = Pointers(2, loads=False)
    stages = Stages([first, second], [[False, False]])
    second.loaded_chunk(0)
    assert stages.wanted(1) == 1 and stages.is_within_reach(1, 1)
    assert stages.wanted(0) is None and stages.next_compute(0) is None
    first.loaded_chunk(0)
    assert stages.next_compute(0) == 1  # though it could be loaded: the next stage waits
    assert stages.computed(0, 1) and first.is_done and stages.next_compute(1) == 1
    assert stages.is_within_reach(1, 1) and not stages.is_within_reach(1, 0)


def test_what_was_computed_or_loaded_first_counts() -> None:
    stages = _stages(2, 2)
    stages.next_compute(0)
    assert stages.computed(0, 0) and stages.input(1, 0) is Input.PRESENT
    assert not stages.loaded_input(1, 0)
    stages.lose_input(1, 0)
    assert stages.input(1, 0) is Input.PRESENT
    assert stages.next_compute(1) == 0
    stages.cancel()
    assert stages.is_done


@given(st.integers(1, 4), st.integers(0, 6), st.integers(0, 1 << 30))
def test_every_stage_is_whole_whatever_becomes_of_the_loads(count: int, chunks: int, seed: int) -> None:
    random = Random(seed)
    pointers = [Pointers(chunks, overtakes=lambda chunk: random.random() < 0.5) for _ in range(count)]
    stages = Stages(pointers, [[random.random() < 0.5 for _ in range(chunks)] for _ in range(count - 1)])
    held: set[tuple[int, int]] = set()  # inputs that the caller has
    for _ in range(5000):
        if stages.is_done:
            break
        stage, what = random.randrange(count), random.randrange(4)
        busy, stored = stages.computing(stage), pointers[stage].stored()
        if what == 0 and stored:
            random.choice([pointers[stage].loaded_chunk, pointers[stage].lose])(random.choice(stored))
        elif what == 1 and (chunk := stages.wanted(stage)) is not None and stages.input(stage, chunk) is Input.STORED:
            if random.random() < 0.5:
                stages.lose_input(stage, chunk)
            elif stages.loaded_input(stage, chunk):
                held.add((stage, chunk))
        elif what == 2 and (chunk := stages.next_compute(stage)) is not None:
            assert busy is None
            assert all(pointers[stage].state(before) is ChunkState.PRESENT for before in range(chunk))
            assert not stage or (stage, chunk) in held
        elif what == 3 and busy is not None:
            if stages.computed(stage, busy):
                held.add((stage + 1, busy))
            held.discard((stage, busy))
    assert stages.is_done
    assert all(each.computed + each.loaded == chunks for each in pointers)


@pytest.mark.parametrize("count", [1, 3])
def test_nothing_to_restore_is_done(count: int) -> None:
    assert _stages(count, 0).is_done
