"""How many pages of a hit SGLang is advised to load, and how that is learned from calls that name no request."""

from __future__ import annotations

import pytest

from kvstore_client.hooks.load import LEAST_QUESTION_S, bounded_wait_s
from kvstore_client.hooks.sglang_choice import PageChoice
from kvstore_client.restore.choice import LoadChoice
from kvstore_client.results import Lookup

PAGE = 64
KEYS = [f"page {number}" for number in range(8)]
OTHERS = [f"other {number}" for number in range(8)]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def found(block_s: float, blocks: int = 8) -> Lookup:
    return Lookup(blocks, blocks * PAGE, ("nvme",) * blocks, block_s * blocks, "", (block_s,) * blocks)


def knowing(token_s: float | None) -> tuple[PageChoice, LoadChoice, Clock]:
    """A choice that saw prompts computed, `token_s` a token; None: it saw nothing."""
    choice, clock = LoadChoice(), Clock()
    for tokens in (64, 512, 128, 1024, 256) * (0 if token_s is None else 3):
        choice.observe_compute(0, tokens, token_s * tokens if token_s else 1.0)
    return PageChoice(choice, page_tokens=PAGE, page_bytes=1 << 16, clock=clock), choice, clock


@pytest.mark.parametrize(
    ("block_s", "token_s", "pages"), [(0.002, 1e-3, 8), (0.63, 1e-3, 0), (0.63, None, 8), (0.63, 1.0, 8)]
)
def test_as_many_pages_are_reported_as_are_faster_to_load(block_s: float, token_s: float | None, pages: int) -> None:
    advised, _, _ = knowing(token_s)
    assert advised.pages(KEYS, found(block_s), 0, 8) == pages


def test_pages_in_memory_are_loaded_where_those_on_a_slow_disk_are_computed() -> None:
    advised, _, _ = knowing(1e-3)
    load_s = (1e-7,) * 3 + (0.6,) * 5
    mixed = Lookup(8, 8 * PAGE, ("host",) * 3 + ("nvme",) * 5, sum(load_s), "", load_s)
    assert advised.pages(KEYS, mixed, 0, 8) == 3
    assert advised.pages(KEYS, mixed, 0, 2) == 2, "side pools can restore no more"


def test_without_a_choice_all_is_loaded_and_nothing_learned() -> None:
    advised = PageChoice(None, page_tokens=PAGE, page_bytes=1 << 16)
    assert advised.pages(KEYS, found(100.0), 0, 7) == 7
    advised.loaded(KEYS, 7, 1.0)
    advised.stored(KEYS)
    assert (advised.load_s(KEYS, 2.0), advised.question_s(8, 0, 2.0)) == (2.0, 2.0)


def test_a_load_has_no_more_time_than_it_could_save() -> None:
    advised, _, _ = knowing(1e-3)
    assert advised.load_s(KEYS, 60.0) == 60.0, "no question was asked for them"
    advised.pages(KEYS, found(0.02), 0, 8)
    assert 0.16 < advised.load_s(KEYS, 60.0) < 0.8
    assert advised.load_s(KEYS, 0.1) == 0.1
    advised.loaded(KEYS, 8, 0.2)
    assert advised.load_s(KEYS, 60.0) == 60.0


def test_a_question_has_no_more_time_than_computing_takes() -> None:
    advised, choice, _ = knowing(1e-3)
    assert advised.question_s(8, 0, 2.0) == pytest.approx(8 * PAGE * 1e-3, rel=0.2)
    assert advised.question_s(8, 0, 0.1) == 0.1
    assert knowing(None)[0].question_s(8, 0, 2.0) == 2.0
    assert bounded_wait_s(choice, 0, 1, None) == LEAST_QUESTION_S
    assert bounded_wait_s(LoadChoice(), 0, 1, None) is None


def test_loads_that_take_longer_than_predicted_are_no_longer_wanted() -> None:
    advised, _, _ = knowing(1e-3)
    for _ in range(6):
        if (pages := advised.pages(KEYS, found(0.01), 0, 8)) == 8:
            advised.loaded(KEYS, 0, advised.load_s(KEYS, 60.0))
    assert pages == 0


def test_of_a_load_that_another_rank_shortened_nothing_is_learned() -> None:
    advised, _, _ = knowing(1e-3)
    for _ in range(6):
        assert advised.pages(KEYS, found(0.01), 0, 8) == 8
        advised.loaded(KEYS[:5], 0, 9.0)


@pytest.mark.parametrize("loaded", [0, 4])
def test_pages_stored_behind_what_was_loaded_say_what_computing_them_took(loaded: int) -> None:
    advised, choice, clock = knowing(None)
    advised.pages(KEYS, found(0.001), 0, 8)
    if loaded:
        clock.now_s += 5.0  # the load
        advised.loaded(KEYS, loaded, 5.0)
    clock.now_s += 0.5
    advised.stored([*KEYS[loaded:], "a page of the answer"])
    tokens = (8 - loaded) * PAGE
    assert choice.known_compute_s(loaded * PAGE, tokens) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("what", ["another question", "a part", "other pages", "nothing for long"])
def test_time_that_others_may_have_used_teaches_nothing(what: str) -> None:
    advised, choice, clock = knowing(None)
    advised.pages(KEYS, found(0.001), 0, 8)
    clock.now_s += 0.5
    stored = {"a part": KEYS[:4], "other pages": OTHERS}.get(what, KEYS)
    if what == "another question":
        advised.pages(OTHERS, found(0.001), 0, 8)
        clock.now_s += 0.5
        stored = OTHERS
    if what == "nothing for long":
        stored = []
    advised.stored(stored)
    assert choice.known_compute_s(0, PAGE) == float("inf")
    clock.now_s += 100.0  # whose request that was is forgotten
    advised.pages(KEYS, found(0.001), 0, 8)
    clock.now_s += 0.5
    advised.stored(KEYS)
    assert choice.known_compute_s(0, 8 * PAGE) == pytest.approx(0.5, rel=0.1)


def test_few_questions_are_remembered() -> None:
    advised, _, _ = knowing(1e-3)
    for number in range(100):
        advised.pages([f"{number}", *KEYS[1:]], found(0.02), 0, 8)
    assert advised.load_s(["0"], 60.0) == 60.0 and advised.load_s(["99"], 60.0) < 60.0
