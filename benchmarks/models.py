"""Measure what a store gains with Gemma 3 270M, a model of which 15 of 18 layers have a window of 512 tokens.

First tokens of a prompt of some 2,000 tokens: cold, and warm from DRAM and from NVMe. The bytes with which
conversations of 4,096 tokens can still be resumed at their ends when the store was short of room, against K/V of all
tokens in all layers. And the tokens restored of prompts that share a beginning which ends anywhere, of those in whole
storage blocks. Every answer is compared with one that was computed without a store. On two idle cores it takes about
four minutes, with `--quick` one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from support.daemon import MIB, BenchDaemon, bench_daemon
from support.report import AT_LEAST, Row, main, median, progress, within
from ttft_restore import prompt_text

from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.generate import Generator
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.loaded_model import LoadOptions, open_model
from kvstore_engine.models.locate import locate
from kvstore_proto.v1 import admin_pb2

MODEL, BLOCK = "gemma-3-270m", 64
TOKENS, LONG = 2_000, 4_096  # of a prompt
CONTEXT = LONG + 4 * BLOCK
FULL_BYTES = 18 * 2 * 256 * 2  # of a token: layers, K and V, one head of 256, f16
ROOM, ARENA, STAGING = 20 * MIB, 4 * MIB, 16 * MIB  # for each conversation, whose full K/V are 72 MiB
_ATTEMPTS = 5
ANSWER = RequestSettings(max_tokens=8, ignore_end=True)


class Checked:
    """A model with the daemon's store, and the same one without: answers must be equal."""

    def __init__(self, stored: Generator, plain: Generator) -> None:
        self._stored, self._plain, self._known = stored, plain, dict[str, list[int]]()

    def store(self, text: str) -> Generation:
        """Return the answer with the store, which nothing is compared with."""
        return self._stored.generate(Prompt(text), ANSWER)

    def ask(self, text: str) -> Generation:
        """Return the answer with the store, once it is compared."""
        answer = self.store(text)
        if text not in self._known:
            self._known[text] = list(self._plain.generate(Prompt(text), ANSWER).tokens)
        if list(answer.tokens) != self._known[text]:
            raise RuntimeError(f"{answer.tokens_restored} tokens were restored, and the answer is another one")
        return answer

    def text(self, seed: int, tokens: int) -> str:
        """Return a text of exactly `tokens` tokens."""
        tokenizer = self._plain.tokenizer
        ids = tokenizer.encode(prompt_text(seed, tokens), add_special=False)[: tokens - 1]
        return tokenizer.decode(ids.tolist())


@contextmanager
def checked(*settings: str) -> Iterator[tuple[BenchDaemon, Checked]]:
    path = locate(MODEL)
    with (
        bench_daemon(*settings) as daemon,
        open_model(path, LoadOptions(context=CONTEXT, kvstore=daemon.socket_dir)) as stored,
        open_model(path, LoadOptions(context=CONTEXT)) as plain,
    ):
        yield daemon, Checked(stored.generator, plain.generator)


def first_tokens(daemon: BenchDaemon, model: Checked, rounds: int) -> list[Row]:
    seconds: dict[str, list[float]] = {"cold": [], "dram": [], "nvme": []}
    for number in range(rounds):
        text = model.text(number, TOKENS)
        seconds["cold"].append(model.ask(text).timings.ttft_s)
        daemon.admin("Flush", admin_pb2.FlushRequest())
        for _ in range(3):
            seconds["dram"].append(_restored(model, text))
        for _ in range(2):
            seconds["nvme"].append(_restored(model, text, daemon.drop_host))
        progress(f"round {number}: " + ", ".join(f"{name} {each[-1] * 1e3:.0f} ms" for name, each in seconds.items()))
    cold_ms, dram_ms, nvme_ms = (median(each) * 1e3 for each in seconds.values())
    return [
        Row("gemma_dram", cold_ms, "ms", dram_ms, "ms warm", AT_LEAST, 20.0),
        Row("gemma_nvme", cold_ms, "ms", nvme_ms, "ms warm", AT_LEAST, 12.0),
    ]


def _restored(model: Checked, text: str, prepare: Callable[[], object] = lambda: None) -> float:
    """Return the seconds until the first token of a stored prompt, after `prepare`. From a slow medium the engine may
    compute a part of it while the rest comes; on a busy machine it may not wait for the store, and is asked again.
    """
    for _ in range(_ATTEMPTS):
        prepare()
        answer = model.ask(text)
        if answer.tokens_restored:
            return answer.timings.ttft_s
        progress(f"none of {answer.prompt_tokens} tokens were restored: {answer.restore.reason}")
    raise RuntimeError(f"none of {answer.prompt_tokens} tokens were restored: {answer.restore.reason}")


def shared_prefixes(model: Checked, prompts: int) -> Row:
    """Prompts that part from a stored one anywhere."""
    model.store(model.text(77, TOKENS))
    restored = possible = 0
    for number, length in enumerate(np.random.default_rng(7).integers(BLOCK, TOKENS, prompts).tolist()):
        shared = model.text(77, length)
        answer = model.ask(f"{shared} {number} ! The bell rang {number} times, and then")
        restored += min(answer.tokens_restored, (length - 1) // BLOCK * BLOCK)
        possible += (length - 1) // BLOCK * BLOCK
        progress(f"{length} shared tokens: {answer.tokens_restored} restored")
    return Row("groups_loaded", float(restored), "tokens", float(possible), "could be restored", AT_LEAST, 0.95)


def short_of_room(daemon: BenchDaemon, model: Checked, conversations: int) -> Row:
    texts = [model.text(100 + number, LONG) for number in range(conversations)]
    for text in texts:
        model.store(text)
    tier = next(each for each in daemon.admin("Tiers", admin_pb2.TiersRequest()).tiers if each.name == "host")
    resumed = [model.ask(f"{text} And") for text in reversed(texts)]
    tokens = sum(answer.tokens_restored for answer in resumed)
    stored = tier.used_by["blocks"]
    progress(f"{stored / 1e6:.0f} MB resume {[answer.tokens_restored for answer in resumed]} tokens")
    if not tokens:
        raise RuntimeError("no conversation can be resumed")
    return within("gemma_bytes_a_token", stored / tokens / FULL_BYTES, "of full K/V", 0.35)


def measure(quick: bool) -> list[Row]:
    with checked("host.capacity=1GiB") as (daemon, model):
        rows = first_tokens(daemon, model, 1 if quick else 3)
        rows.append(shared_prefixes(model, 3 if quick else 12))
    conversations = 2 if quick else 3
    capacity = STAGING + conversations * ROOM + 4 * ARENA
    sizes = f"host.capacity={capacity}", f"host.staging={STAGING}", f"host.arena={ARENA}"
    with checked(*sizes, "nvme.enabled=false") as (daemon, model):
        rows.append(short_of_room(daemon, model, conversations))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
