"""chunk_plan: covers the prompt, and the tail is the same step for any number of restored blocks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.graph.plan import chunk_plan

_BLOCK = st.sampled_from([16, 64])
_CHUNK_BLOCKS = st.integers(1, 8)


@given(start=st.integers(0, 3000), length=st.integers(0, 3000), block=_BLOCK, chunk_blocks=_CHUNK_BLOCKS)
def test_steps_cover_the_range_in_order(start: int, length: int, block: int, chunk_blocks: int) -> None:
    chunk = block * chunk_blocks
    steps = chunk_plan(start, start + length, block=block, chunk=chunk)
    positions = [position for first, last in steps for position in range(first, last)]
    assert positions == list(range(start, start + length))
    assert all(0 < last - first <= chunk for first, last in steps)
    assert all(first % block == 0 for first, _ in steps[1:])
    assert all((last - first) % block == 0 for first, last in steps[:-1] if first % block == 0)


@given(end=st.integers(1, 5000), restored_blocks=st.integers(0, 80), block=_BLOCK, chunk_blocks=_CHUNK_BLOCKS)
def test_a_restored_prefix_leaves_the_tail_as_it_was(
    end: int, restored_blocks: int, block: int, chunk_blocks: int
) -> None:
    most = (end - 1) // block
    start = min(restored_blocks, most) * block
    cold = chunk_plan(0, end, block=block, chunk=block * chunk_blocks)
    warm = chunk_plan(start, end, block=block, chunk=block * chunk_blocks)
    assert warm[-1] == cold[-1] == (most * block, end)
    assert {last for _, last in warm} <= {last for _, last in cold}


@pytest.mark.parametrize(
    ("start", "end", "block", "chunk"), [(-1, 4, 64, 64), (5, 4, 64, 64), (0, 4, 64, 96), (0, 4, 0, 0)]
)
def test_impossible_requests_are_refused(start: int, end: int, block: int, chunk: int) -> None:
    with pytest.raises(ValueError):
        chunk_plan(start, end, block=block, chunk=chunk)
