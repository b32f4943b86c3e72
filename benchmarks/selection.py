"""Retrieval and decode speed where new tokens of an answer read half of a long context (`--select-pages`).

A context is plain sentences (the noise of the pass-key task, Mohtashami & Jaggi 2023) with facts at random
places: four of unlike forms (`needle`), and two pairs of one form each, which differ in the thing named (`keys`). A
question is the beginning of a fact's sentence, with SmolLM2 in its chat template as the beginning of the answer; it is
answered if the greedy tokens are the fact's value. With the selection the question's own tokens select, too: else the
first token of each answer would come from all of attention. Reads are reads of K, V and page bounds, in layers without
a window; the score counts the tasks and lengths on which all of attention answers at least 80 %.

Speed: SmolLM2 behind 8,064 tokens, one token all of attention and one token half of it in turns. On two idle cores it
takes about ten minutes, with `--quick` three.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from support.report import AT_LEAST, Row, main, median, progress, within

from kvstore_engine.executors import DeviceName, PoolSetup, StepExecutor, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.models.locate import locate
from kvstore_engine.opening import open_executor
from kvstore_engine.page_selection import PAGE_TOKENS, RECENT_PAGES, PageSelection
from kvstore_engine.tokenizer import Tokenizer

MODELS = "smollm2-135m-instruct:q8_0", "gemma-3-270m:q8_0"
HALF = PageSelection.parse("44%")  # with the bounds half of the bytes
LENGTHS, CONTEXT, BLOCK, STEP = (2048, 4096, 8064), 8192, 16, 512
GOOD = 0.8
NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
THINGS = "lamp bridge garden violin castle river engine pillow mirror candle basket ladder"
COLOURS = "blue red green yellow black white purple orange silver golden brown pink"
CITIES = "Paris London Tokyo Berlin Madrid Cairo Rome Oslo Vienna Dublin Athens Boston"
NAMES = "Anna Peter Maria Thomas Julia Robert Laura David Helen Martin Clara Simon"
_TAIL_BLOCKS, _ASKED = 4, 8  # of each question; questions on a context
Ids = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Fact:
    """A sentence is `beginning` + `value` and a full stop."""

    task: str
    beginning: str
    value: str


def facts(random: np.random.Generator) -> list[Fact]:
    lists = THINGS, COLOURS, CITIES, NAMES
    things, colours, cities, names = (random.permutation(words.split()) for words in lists)
    digits = "".join(map(str, random.integers(0, 10, 4)))
    return [
        Fact("needle", f"The code of the {things[0]} is", f" {digits}"),
        Fact("needle", "The doctor of the village is called", f" {names[0]}"),
        Fact("needle", f"The colour of the {things[1]} is", f" {colours[0]}"),
        Fact("needle", "The next ship sails to", f" {cities[0]}"),
        *(Fact("keys", f"The {colours[at]} {things[at]} was made in", f" {cities[at]}") for at in (2, 3)),
        *(Fact("keys", f"The {things[at]} in the house belongs to", f" {names[at]}") for at in (4, 5)),
    ]


class Asked:
    """A model whose questions on one context are answered side by side, each with blocks of its own behind it."""

    def __init__(self, executor: StepExecutor, tokenizer: Tokenizer, *, chat: bool) -> None:
        self.executor, self.tokenizer, self._chat = executor, tokenizer, chat
        self._blocks = np.arange(executor.pool.blocks, dtype=np.int32)
        self.base: Ids = np.empty(0, np.int32)

    def read(self, length: int, planted: list[Fact], random: np.random.Generator) -> None:
        """Compute a context of `length` tokens with the facts `planted` in it."""
        begin = self._ids("<|im_start|>user\nRead the text.\n\n" if self._chat else "", special=not self._chat)
        sentences = [self._ids(f" {fact.beginning}{fact.value}.") for fact in planted]
        noise = np.tile(self._ids(NOISE), length // 16)[: length - len(begin) - sum(map(len, sentences))]
        places = np.sort(random.choice(np.arange(64, len(noise) - 4 * PAGE_TOKENS), len(planted), replace=False))
        pieces = [begin]
        for place, part in zip(np.split(noise, places), [*sentences, noise[:0]], strict=True):
            pieces += [place, part]
        self.base = np.concatenate(pieces)
        for start in range(0, length, STEP):
            self._step([self.base[start : start + STEP]], [start], [self._blocks], None)

    def answers(self, questions: list[Fact], selection: PageSelection | None) -> list[bool]:
        """Return for each question whether the model's next tokens are the value."""
        closing = "<|im_end|>\n<|im_start|>assistant\n" if self._chat else "\n\n"
        asked = [self._ids(closing + fact.beginning) for fact in questions]
        wanted = [self._ids(fact.value) for fact in questions]
        first = len(self.base) // BLOCK
        own = np.split(self._blocks[first : first + _TAIL_BLOCKS * len(questions)], len(questions))
        tables = [np.concatenate([self._blocks[:first], blocks]) for blocks in own]
        texts = [ids.tolist() for ids in asked]
        logits, done = [np.empty(0)] * len(questions), [0] * len(questions)
        while rows := [row for row in range(len(questions)) if done[row] < len(asked[row]) + len(wanted[row])]:
            tokens = []
            for row in rows:
                if done[row] >= len(texts[row]):
                    texts[row].append(int(logits[row].argmax()))
                tokens.append(np.array(texts[row][done[row] :][: 1 if selection else None], np.int32))
            starts = [len(self.base) + done[row] for row in rows]
            found = self._step(tokens, starts, [tables[row] for row in rows], selection)
            for row, piece, each in zip(rows, tokens, found, strict=True):
                logits[row], done[row] = each, done[row] + len(piece)
        return [text[len(ask) :] == want.tolist() for text, ask, want in zip(texts, asked, wanted, strict=True)]

    def step_s(self, selection: PageSelection | None) -> float:
        """Return the seconds of a step that computes one token at the end of the context."""
        begin = time.perf_counter()
        self._step([self.base[-1:]], [len(self.base) - 1], [self._blocks], selection)
        return time.perf_counter() - begin

    def _step(
        self, tokens: list[Ids], starts: list[int], tables: list[Ids], selection: PageSelection | None
    ) -> npt.NDArray[np.float32]:
        slices = []
        for ids, start, table in zip(tokens, starts, tables, strict=True):
            pages = 0 if selection is None else selection.read_pages(start + 1)
            windows = table if self.executor.pool.window is not None else None
            slices.append(SequenceSlice(ids, start, table, "last", windows, pages))
        return self.executor.forward(slices)

    def _ids(self, text: str, *, special: bool = False) -> Ids:
        return self.tokenizer.encode(text, add_special=special, parse_special=True).astype(np.int32)


@contextmanager
def opened(model: str) -> Iterator[Asked]:
    file = GGUFFile.open(locate(model))
    tokenizer = Tokenizer.from_metadata(file.metadata)
    blocks = CONTEXT // BLOCK + _ASKED * _TAIL_BLOCKS
    windows = blocks if ModelConfig.from_gguf(file).windowed_layers else 0  # all are kept: tables are the same
    setup, sizes = PoolSetup(blocks, BLOCK, "f16", windows, HALF), StepSizes(2, STEP, _ASKED, CONTEXT)
    with open_executor(file, DeviceName.parse("cpu"), setup, sizes) as executor:
        yield Asked(executor, tokenizer, chat=model.startswith("smollm2"))


def reads(length: int) -> float:
    """Return the share of the bytes of K and V that a token reads which sees `length` tokens, with the bounds."""
    pages = -(-length // PAGE_TOKENS)
    bounded = (pages - 1 - RECENT_PAGES) * PAGE_TOKENS // BLOCK  # blocks
    return (HALF.read_pages(length) + bounded / (PAGE_TOKENS // BLOCK) / BLOCK) / pages


def scores(name: str, model: Asked, contexts: int) -> tuple[npt.NDArray[np.int64], list[str]]:
    """Return the answers with the selection and with all of attention to what is done well, and the names of these
    tasks and lengths. The last context of the greatest length stays.
    """
    total, counted = np.zeros(2, np.int64), []
    for length in LENGTHS:
        counts = {"needle": np.zeros(2, np.int64), "keys": np.zeros(2, np.int64)}
        for number in range(contexts):
            random = np.random.default_rng([length, number])
            asked = facts(random)
            model.read(length, [asked[at] for at in random.permutation(len(asked))], random)
            both = zip(asked, model.answers(asked, HALF), model.answers(asked, None), strict=True)
            for fact, selected, full in both:
                counts[fact.task] += (selected, full)
        asked_of = contexts * _ASKED // len(counts)
        for task, answers in counts.items():
            is_good = answers[1] >= GOOD * asked_of
            if is_good:
                total += answers
                counted.append(f"{name} {task} {length}")
            progress(
                f"{name} {task} {length} tokens: {answers[1]}/{asked_of} with all of attention, {answers[0]} with "
                f"{reads(length):.0%} of the reads{'' if is_good else ' (not counted)'}"
            )
    return total, counted


def speed(model: Asked, turns: int) -> tuple[float, float]:
    """Return the tokens a second behind the context read last, with the selection and with all of attention."""
    for selection in (HALF, None):
        model.step_s(selection)
    seconds = [(model.step_s(HALF), model.step_s(None)) for _ in range(turns)]
    return 1 / median([half for half, _ in seconds]), 1 / median([full for _, full in seconds])


def measure(quick: bool) -> list[Row]:
    rows, total, counted = [], np.zeros(2, np.int64), []
    for name in MODELS:
        with opened(name) as model:
            short = name.split("-")[0]
            answers, cells = scores(short, model, 2 if quick else 6)
            total += answers
            counted += cells
            if cells:
                rows.append(_score(f"selection_score_{short}", answers, cells, None))
            half, full = speed(model, 24 if quick else 60)
            target = 1.3 if short == "smollm2" else None  # of Gemma's 18 layers three see all of the context
            row = "selection_decode_8k" if target else f"selection_decode_8k_{short}"
            rows.append(Row(row, half, "tokens/s", full, "tokens/s, all of attention", AT_LEAST, target))
    if not counted:
        raise SystemExit("all of attention answers no task well enough to compare anything")
    rows.append(_score("selection_score", total, counted, 0.98))
    return [*rows, within("selection_reads", max(map(reads, LENGTHS)), "of the bytes", 0.5)]


def _score(name: str, answers: npt.NDArray[np.int64], cells: list[str], target: float | None) -> Row:
    baseline = f"with all of attention: {', '.join(cells)}"
    return Row(name, int(answers[0]), "answers", int(answers[1]), baseline, AT_LEAST, target)


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
