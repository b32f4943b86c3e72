"""SGLang is advised how many pages of a hit to load, learned from calls that name no request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvstore_client.results import Lookup
from kvstore_connectors.load import LEAST_QUESTION_S, bounded_wait_s
from kvstore_connectors.sglang.choice import PageChoice
from kvstore_restore.choice import LoadChoice

PAGE = 64
KEYS = [f"page {number}" for number in range(8)]
BATCH = 128  # SGLang's STORAGE_BATCH_SIZE
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
    assert advised.pages(KEYS, found(block_s), [], 8) == pages


def test_pages_in_memory_are_loaded_where_those_on_a_slow_disk_are_computed() -> None:
    advised, _, _ = knowing(1e-3)
    load_s = (1e-7,) * 3 + (0.6,) * 5
    mixed = Lookup(8, 8 * PAGE, ("host",) * 3 + ("nvme",) * 5, sum(load_s), "", load_s)
    assert advised.pages(KEYS, mixed, [], 8) == 3
    assert advised.pages(KEYS, mixed, [], 2) == 2, "side pools can restore no more"


def test_without_a_choice_all_is_loaded_and_nothing_learned() -> None:
    advised = PageChoice(None, page_tokens=PAGE, page_bytes=1 << 16)
    assert advised.pages(KEYS, found(100.0), [], 7) == 7
    advised.loaded(KEYS, 7, 1.0)
    advised.stored(KEYS, [])
    assert (advised.load_s(KEYS, 2.0), advised.question_s(8, [], 2.0)) == (2.0, 2.0)


def test_a_load_has_no_more_time_than_it_could_save() -> None:
    advised, _, _ = knowing(1e-3)
    assert advised.load_s(KEYS, 60.0) == 60.0, "no question was asked for them"
    advised.pages(KEYS, found(0.02), [], 8)
    assert 0.16 < advised.load_s(KEYS, 60.0) < 0.8
    assert advised.load_s(KEYS, 0.1) == 0.1
    advised.loaded(KEYS, 8, 0.2)
    assert advised.load_s(KEYS, 60.0) == 60.0


def test_a_question_has_no_more_time_than_computing_takes() -> None:
    advised, choice, _ = knowing(1e-3)
    assert advised.question_s(8, [], 2.0) == pytest.approx(8 * PAGE * 1e-3, rel=0.2)
    assert advised.question_s(8, [], 0.1) == 0.1
    assert knowing(None)[0].question_s(8, [], 2.0) == 2.0
    assert bounded_wait_s(choice, 0, 1, None) == LEAST_QUESTION_S
    assert bounded_wait_s(LoadChoice(), 0, 1, None) is None


def test_loads_that_take_longer_than_predicted_are_no_longer_wanted() -> None:
    advised, _, _ = knowing(1e-3)
    for _ in range(6):
        if (pages := advised.pages(KEYS, found(0.01), [], 8)) == 8:
            advised.loaded(KEYS, 0, advised.load_s(KEYS, 60.0))
    assert pages == 0


def test_of_a_load_that_another_rank_shortened_nothing_is_learned() -> None:
    advised, _, _ = knowing(1e-3)
    for _ in range(6):
        assert advised.pages(KEYS, found(0.01), [], 8) == 8
        advised.loaded(KEYS[:5], 0, 9.0)


@pytest.mark.parametrize("loaded", [0, 4])
def test_pages_stored_behind_what_was_loaded_say_what_computing_them_took(loaded: int) -> None:
    advised, choice, clock = knowing(None)
    advised.pages(KEYS, found(0.001), [], 8)
    if loaded:
        clock.now_s += 5.0  # the load
        advised.loaded(KEYS, loaded, 5.0)
    clock.now_s += 0.5
    advised.stored([*KEYS[loaded:], "a page of the answer"], KEYS[:loaded])
    tokens = (8 - loaded) * PAGE
    assert choice.known_compute_s(loaded * PAGE, tokens) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("what", ["another question", "a part", "other pages", "unnamed prefix", "nothing for long"])
def test_time_that_others_may_have_used_teaches_nothing(what: str) -> None:
    advised, choice, clock = knowing(None)
    advised.pages(KEYS, found(0.001), [], 8)
    clock.now_s += 0.5
    stored = {"a part": KEYS[:4], "other pages": OTHERS}.get(what, KEYS)
    if what == "another question":
        advised.pages(OTHERS, found(0.001), [], 8)
        clock.now_s += 0.5
        stored = OTHERS
    if what == "nothing for long":
        stored = []
    advised.stored(stored, None if what == "unnamed prefix" else [])
    assert choice.known_compute_s(0, PAGE) == float("inf")
    clock.now_s += 100.0  # whose request that was is forgotten
    advised.pages(KEYS, found(0.001), [], 8)
    clock.now_s += 0.5
    advised.stored(KEYS, [])
    assert choice.known_compute_s(0, 8 * PAGE) == pytest.approx(0.5, rel=0.1)


def test_few_questions_are_remembered() -> None:
    advised, _, _ = knowing(1e-3)
    for number in range(100):
        advised.pages([f"{number}", *KEYS[1:]], found(0.02), [], 8)
    assert advised.load_s(["0"], 60.0) == 60.0 and advised.load_s(["99"], 60.0) < 60.0


@dataclass
class Controller:
    """SGLang's loops over batches of pages (`HiCacheController`), and what loading and computing take."""

    advised: PageChoice
    clock: Clock
    page_load_s: float
    token_s: float
    names_prefixes: bool = True

    def batches(self, keys: list[str], first: int = 0) -> Iterator[tuple[list[str], list[str] | None]]:
        """Return the batches of keys[first:], each with what is before it."""
        for start in range(first, len(keys), BATCH):
            yield keys[start : start + BATCH], keys[:start] if self.names_prefixes else None

    def hits(self, keys: list[str], stored: int) -> int:
        """Pages of a prompt that SGLang loads; it stops at the first batch that is not reported whole."""
        hits = 0
        for batch, prefix in self.batches(keys):
            there = min(len(batch), max(stored - hits, 0))
            pages = self.advised.pages(batch, found(self.page_load_s, there), prefix, there)
            hits += pages
            if pages < len(batch):
                break
        return hits

    def load(self, keys: list[str]) -> None:
        for batch, _ in self.batches(keys):
            self.clock.now_s += self.page_load_s * len(batch)
            self.advised.loaded(batch, len(batch), self.page_load_s * len(batch))

    def compute(self, keys: list[str], first: int) -> None:
        self.clock.now_s += self.token_s * PAGE * (len(keys) - first)
        for batch, prefix in self.batches(keys, first):
            self.advised.stored(batch, prefix)


@pytest.mark.parametrize("names_prefixes", [True, False])
def test_of_a_long_prompt_no_batch_is_cut_that_another_follows(names_prefixes: bool) -> None:
    advised, _, clock = knowing(1e-3)
    controller = Controller(advised, clock, PAGE * 1e-3 / 5, 1e-3, names_prefixes)
    begin = clock.now_s
    for number in range(60):
        keys = [f"prompt {number} page {page}" for page in range(1000)]
        hits = controller.hits(keys, 1000)
        assert hits >= 1000 - BATCH // 8, number
        controller.load(keys[:hits])
        controller.compute(keys, hits)
    assert clock.now_s - begin < 1.03 * 60 * 1000 * controller.page_load_s


def test_a_long_prompt_that_is_slow_to_load_is_computed() -> None:
    advised, _, clock = knowing(1e-3)
    controller = Controller(advised, clock, PAGE * 1e-3 * 3, 1e-3)
    assert controller.hits([f"{page}" for page in range(1000)], 1000) == 0


@pytest.mark.parametrize(("loaded", "is_learned"), [(168, True), (128, True), (0, False)])
def test_the_batches_of_one_prompt_are_one_request(loaded: int, is_learned: bool) -> None:
    advised, choice, clock = knowing(None)
    controller = Controller(advised, clock, 0.01, 0.5 / PAGE)
    keys = [f"{page}" for page in range(200)]
    assert controller.hits(keys, 168) == 168
    controller.load(keys[:loaded])  # the rest of the load was ended by SGLang
    controller.compute(keys, loaded)
    known_s = choice.known_compute_s(loaded * PAGE, (200 - loaded) * PAGE)
    assert known_s == (pytest.approx((200 - loaded) * 0.5, rel=0.1) if is_learned else float("inf"))


def test_a_request_behind_a_whole_batch_of_another_prompt_is_not_its_next_batch() -> None:
    advised, choice, clock = knowing(None)
    controller = Controller(advised, clock, 0.01, 0.01)
    controller.hits([f"{page}" for page in range(BATCH)], BATCH)
    assert controller.hits(KEYS, 0) == 0
    controller.compute(KEYS, 0)
    assert choice.known_compute_s(0, PAGE) == float("inf")


@pytest.mark.parametrize("names_prefixes", [True, False])
def test_positions_are_those_behind_the_batches_before(names_prefixes: bool) -> None:
    advised, choice, clock = knowing(1e-3)
    keys = [f"{page}" for page in range(3 * BATCH)]
    named = Controller(advised, clock, 0.01, 1e-3, names_prefixes)
    assert named.hits(keys[: 2 * BATCH], 2 * BATCH) == 2 * BATCH
    prefix = keys[: 2 * BATCH] if names_prefixes else None
    seconds = choice.known_compute_s(2 * BATCH * PAGE, BATCH * PAGE)
    assert seconds != choice.known_compute_s(0, BATCH * PAGE)
    assert advised.question_s(BATCH, prefix, 1e9) == seconds
    clock.now_s += 1.0
    if not names_prefixes:
        assert advised.question_s(BATCH, None, 1e9) != seconds, "too late to be the next batch"


def test_what_was_computed_is_learned_at_the_position_that_it_is_stored_at() -> None:
    """SGLang leaves out the last node of a prefix when it asks, and names it when it stores."""
    advised, choice, clock = knowing(None)
    advised.pages(KEYS, found(0.001, 0), [], 0)
    clock.now_s += 0.5
    advised.stored(KEYS, [f"before {page}" for page in range(10_000)])
    expected = LoadChoice()
    expected.observe_compute(10_000 * PAGE, 8 * PAGE, 0.5)
    assert choice.known_compute_s(0, 8 * PAGE) == expected.known_compute_s(0, 8 * PAGE)
