"""Copies as arrays are the copies that a plain loop over pieces makes, neighbours in one, for any pool and pages."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_client.device import DevicePool, PoolPart
from kvstore_cuda.copies import CopyRun, Runs
from tests.reference.examples import examples

UNIT = 16


def joined(runs: Iterable[CopyRun]) -> list[CopyRun]:
    """One at a time: a run goes on where the one before it ends, on both sides."""
    found: list[CopyRun] = []
    for run in sorted(runs, key=lambda run: run.to):
        last = found[-1] if found else None
        if last and last.to + last.nbytes == run.to and last.source + last.nbytes == run.source:
            found[-1] = CopyRun(last.to, last.source, last.nbytes + run.nbytes)
        else:
            found.append(run)
    return found


def pieces(pool: DevicePool, layer: int, blocks: list[list[int]], payloads: list[int]) -> list[tuple[int, int, int]]:
    """Return the pieces of one layer: where in the pool, where in a payload, bytes."""
    sizes = [pool.block_pages * sum(part.nbytes for part in parts) for parts in pool.layers]
    starts = list(accumulate(sizes, initial=0))
    found = []
    for pages, payload in zip(blocks, payloads, strict=True):
        offset = starts[layer]
        for part in pool.layers[layer]:
            for page in pages:
                found.append((part.address + page * part.stride, payload + offset, part.nbytes))
                offset += part.nbytes
    return found


@st.composite
def runs(draw: st.DrawFn) -> list[CopyRun]:
    """Destinations do not overlap; sources follow each other often. In any order."""
    found, to, source = [], draw(st.integers(0, 2**46)), draw(st.integers(0, 2**46))
    for _ in range(draw(st.integers(0, 12))):
        nbytes = draw(st.integers(1, 3)) * UNIT
        to += draw(st.sampled_from([0, 0, UNIT]))
        source = draw(st.sampled_from([source, source, source + UNIT, max(source - 5 * UNIT, 0)]))
        found.append(CopyRun(to, source, nbytes))
        to, source = to + nbytes, source + nbytes
    return draw(st.permutations(found))


@st.composite
def pools(draw: st.DrawFn) -> DevicePool:
    """Layers of one to three parts; parts are planes, or lie in a page one after another. A block has 1 to 3 pages."""
    pages, block_pages = draw(st.integers(1, 9)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4))
    page_bytes, are_planes = sum(map(sum, sizes)) * UNIT, draw(st.booleans())
    at, layers = draw(st.integers(1, 2**40)) * UNIT, []
    for parts in sizes:
        layer = []
        for size in parts:
            nbytes = size * UNIT
            gap = draw(st.sampled_from([0, 0, UNIT])) if are_planes else 0
            layer.append(PoolPart(at, nbytes + gap if are_planes else page_bytes, nbytes))
            at += (nbytes + gap) * pages if are_planes else nbytes
        layers.append(layer)
    return DevicePool(draw(st.permutations(layers)), pages, block_pages=block_pages)


@st.composite
def copies(draw: st.DrawFn) -> tuple[DevicePool, list[list[int]], list[int]]:
    """Some blocks of a pool, and payloads without overlap: in a row as in the buffer, or with headers between."""
    pool = draw(pools())
    pages, each = draw(st.lists(st.integers(0, pool.pages - 1), unique=True)), pool.block_pages
    blocks = [pages[at : at + each] for at in range(0, len(pages) - each + 1, each)]
    slot_bytes = pool.block_bytes + draw(st.sampled_from([0, 4096]))
    slots = draw(st.permutations(range(len(blocks))))
    return pool, blocks, [(1 << 45) + slot * slot_bytes for slot in slots]


@settings(max_examples=examples(100), deadline=None)
@given(runs())
def test_runs_are_joined_where_both_sides_go_on(rows: list[CopyRun]) -> None:
    assert list(Runs.of(rows).merged().rows()) == joined(rows)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(runs(), min_size=1, max_size=5))
def test_groups_are_joined_each_for_itself(groups: list[list[CopyRun]]) -> None:
    bounds = list(accumulate(map(len, groups), initial=0))
    found = Runs.joined([Runs.of(group) for group in groups]).merged_groups(bounds)
    assert [list(group.rows()) for group in found] == [joined(group) for group in groups]


@settings(max_examples=examples(100), deadline=None)
@given(copies(), st.data())
def test_copies_to_pages_are_those_of_each_piece_layer_by_layer(
    case: tuple[DevicePool, list[list[int]], list[int]], data: st.DataObject
) -> None:
    pool, blocks, payloads = case
    expected = [
        joined(CopyRun(*piece) for piece in pieces(pool, layer, blocks, payloads)) for layer in range(len(pool.layers))
    ]
    assert [list(layer.rows()) for layer in pool.to_pages(blocks, payloads)] == expected
    first = data.draw(st.integers(0, len(expected)))
    end = data.draw(st.integers(first, len(expected)))
    assert [list(layer.rows()) for layer in pool.to_pages(blocks, payloads, range(first, end))] == expected[first:end]


@settings(max_examples=examples(100), deadline=None)
@given(copies())
def test_copies_from_pages_are_the_other_way(case: tuple[DevicePool, list[list[int]], list[int]]) -> None:
    pool, blocks, payloads = case
    layers = [
        [CopyRun(to, source, nbytes) for source, to, nbytes in pieces(pool, layer, blocks, payloads)]
        for layer in range(len(pool.layers))
    ]
    assert [list(layer.rows()) for layer in pool.from_pages(blocks, payloads)] == [joined(layer) for layer in layers]
    at_once = pool.from_pages_at_once(blocks, payloads)
    assert list(at_once.rows()) == joined(run for layer in layers for run in layer)
