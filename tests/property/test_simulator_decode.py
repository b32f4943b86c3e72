"""Decoding from slow memory: what orchestrated reads and waits for against the baseline, for any selection."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore_simulator.decode import BASELINE, ORCHESTRATED, DecodeRow, DecodeStudy, LayerPlan, Scratch, plans_of
from kvstore_simulator.hit_value import ModelSize
from kvstore_simulator.machine import MediumSpec, load_machine
from kvstore_simulator.page_trace import PageStep, PageTrace
from tests.reference.examples import examples

MODEL = ModelSize("made", 3e6, 2, 4, 2, 16)
MACHINE = load_machine("cpu-only")
SOURCES = st.builds(
    lambda rate, latency: replace(MACHINE.media["cxl"], read_bytes_per_s=rate, latency_s=latency),
    st.floats(1e5, 1e12), st.sampled_from([0.0, 1e-7, 1e-4]),
)  # fmt: skip
POLICIES = st.sampled_from(["lru", "lfu-ttl", "s3-fifo", "w-tinylfu"])


@st.composite
def traces(draw: st.DrawFn) -> PageTrace:
    pages, steps = draw(st.integers(1, 12)), []
    for _ in range(draw(st.integers(1, 6))):
        pages += draw(st.integers(0, 2))
        selected = [
            tuple(sorted(draw(st.sets(st.integers(0, pages - 1), min_size=1)))) for _ in range(MODEL.layers)
        ]  # fmt: skip
        steps.append(PageStep(pages, selected))
    return PageTrace("made", MODEL, draw(st.sampled_from([4, 64])), steps)


def rows_of(trace: PageTrace, source: MediumSpec, policy: str, scratch_pages: int) -> dict[tuple[str, bool], DecodeRow]:
    study = DecodeStudy(trace, MACHINE, scratch_pages * trace.page_bytes, [source], [policy])
    return {(row.plan, row.overlaps): row for row in study.rows()}


@settings(deadline=None, max_examples=examples(60))
@given(trace=traces(), source=SOURCES, policy=POLICIES, scratch_pages=st.integers(1, 60))
def test_orchestrated_never_reads_more_and_overlap_never_waits_longer(
    trace: PageTrace, source: MediumSpec, policy: str, scratch_pages: int
) -> None:
    rows = rows_of(trace, source, policy, scratch_pages)
    for overlaps in (False, True):
        ours, baseline = rows[ORCHESTRATED, overlaps], rows[BASELINE, overlaps]
        for token, other in zip(ours.tokens, baseline.tokens, strict=True):
            assert token.read_bytes <= other.read_bytes and token.slow_bytes <= other.slow_bytes
            assert 0 <= token.hits <= token.pages <= other.pages and other.hits == 0
    for plan in (BASELINE, ORCHESTRATED):
        for on, off in zip(rows[plan, True].tokens, rows[plan, False].tokens, strict=True):
            assert on.exposed_s <= off.exposed_s + 1e-12 and on.hits == off.hits


@settings(deadline=None, max_examples=examples(60))
@given(trace=traces(), source=SOURCES, policy=POLICIES, faster=st.floats(1, 100), later=st.floats(0, 1e-3))
def test_exposed_latency_falls_with_the_rate_and_grows_with_the_latency(
    trace: PageTrace, source: MediumSpec, policy: str, faster: float, later: float
) -> None:
    rows = rows_of(trace, source, policy, 20)
    fast = rows_of(trace, replace(source, read_bytes_per_s=source.read_bytes_per_s * faster), policy, 20)
    slow = rows_of(trace, replace(source, latency_s=source.latency_s + later), policy, 20)
    for way, row in rows.items():
        exposed_s = row.sum("exposed_s")
        assert fast[way].sum("exposed_s") <= exposed_s * (1 + 1e-9) + 1e-15
        assert slow[way].sum("exposed_s") >= exposed_s * (1 - 1e-9) - 1e-15


@settings(deadline=None, max_examples=examples(60))
@given(trace=traces(), policy=POLICIES, capacity=st.integers(0, 40))
def test_a_place_has_one_page_and_is_not_filled_while_attention_may_read_it(
    trace: PageTrace, policy: str, capacity: int
) -> None:
    scratch = Scratch(capacity, trace.page_bytes, policy)
    content: dict[int, tuple[int, int]] = {}
    last: LayerPlan | None = None
    for layers in plans_of(trace, scratch):
        for layer, plan in enumerate(layers):
            assert len(set(plan.places)) == len(plan.places) == len(plan.pages)
            filled = {place for page, place in zip(plan.pages, plan.places, strict=True) if page not in plan.held}
            assert last is None or not filled & set(last.places), "what the layer before reads"
            for page, place in zip(plan.pages, plan.places, strict=True):
                if page in plan.held:
                    assert content[place] == (layer, page), "a page that was said to be held"
                content[place] = layer, page
            assert not plan.held & set(plan.likely)
            last = plan
    assert scratch.residency.tier_blocks(0) <= capacity
