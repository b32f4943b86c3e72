"""Measures how much sooner the first token comes when the prefix is restored, and what restoring itself costs.

A prompt of 2,000 tokens and more, SmolLM2-135M, each request in an engine process of its own: cold (nothing stored),
warm from DRAM, warm from NVMe (DRAM dropped before each). The baseline of the restoration is memcpy of as many bytes
between touched arrays of one process, which take turns so that the bytes come from memory and not from a cache, as a
restored prefix does; the same with one pair of arrays, partly cached, is reported beside it. Time to first token counts
from the prompt's text in hand: tokenization, lookup, restore, prefill of what is left. Restoration is what the engine
reports for lookup, lease and copy into its block pool; "time to first token less prefill" contains tokenization and
sampling too. Last, five prompts are answered with 256 tokens each, cold and warm: the token ids must be equal.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.daemon import BenchDaemon, bench_daemon
from support.engine import generate
from support.report import AT_LEAST, Row, main, median, progress, time_each, within

from kvstore_proto.v1 import admin_pb2

PREFIX_WORDS = 1_620  # some 2,050 tokens
QUESTIONS = (
    "What does the second chapter say about the keeper of the lamp, and whom did she write to in the end?",
    "Name three things that were counted in the storehouse before the long winter came.",
    "Who was to ring the bell, how often, and at which hour of the night?",
    "Write a short letter to the harbour master about the broken gate.",
    "Explain in plain words why the ferry did not sail on the day of the feast.",
)
VOCABULARY = (
    "the keeper counted seven lamps before winter and wrote to her brother about rope oil bread and the broken gate "
    "while the ferry waited for wind and nobody rang the bell at night because the master was away on the island"
)


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvttft-") as name, bench_daemon("host.capacity=1GiB") as daemon:
        prompt = Path(name) / "system.txt"
        cold, dram, nvme = [], [], []
        for round_number in range(1 if quick else 3):
            prompt.write_text(prompt_text(round_number))
            cold.append(_ask(daemon, prompt, QUESTIONS[0], tokens=8))
            _flush(daemon)
            for _ in range(3):
                dram.append(_ask(daemon, prompt, QUESTIONS[0], tokens=8))
            for _ in range(2):
                daemon.drop_host()
                nvme.append(_ask(daemon, prompt, QUESTIONS[0], tokens=8))
            progress(
                f"round {round_number}: {cold[-1]['prompt_tokens']} tokens, cold {_ttft(cold[-1]):.0f} ms, "
                f"DRAM {_ttft(dram[-1]):.0f} ms, NVMe {_ttft(nvme[-1]):.0f} ms"
            )
        memcpy_ms = _memcpy_ms(dram[0]["bytes_restored"], pairs=4)
        cached_memcpy_ms = _memcpy_ms(dram[0]["bytes_restored"], pairs=1)
        cold_ms = median([_ttft(answer) for answer in cold])
        differing = _differing_answers(daemon, Path(name), tokens=64 if quick else 256)
    restores_ms = [(a["timings"]["lookup_s"] + a["timings"]["restore_s"]) * 1e3 for a in dram]
    others_ms = [_ttft(a) - a["timings"]["prefill_s"] * 1e3 for a in dram]
    return [
        _speed_up("ttft_cold_over_warm_dram", cold_ms, median([_ttft(answer) for answer in dram]), 20.0),
        _speed_up("ttft_cold_over_warm_nvme", cold_ms, median([_ttft(answer) for answer in nvme]), 12.0),
        Row("restore_from_dram", median(restores_ms), "ms", memcpy_ms, "memcpy of the same bytes", target=1.5),
        Row("restore_from_dram_cached", median(restores_ms), "ms", cached_memcpy_ms, "memcpy, partly from cache"),
        Row("ttft_less_prefill", median(others_ms), "ms", memcpy_ms, "memcpy of the same bytes"),
        within("answers_that_differ_cold_to_warm", float(differing), "of 5", 0.5),
    ]


def _speed_up(name: str, cold_ms: float, warm_ms: float, target: float) -> Row:
    return Row(name, cold_ms, "ms", warm_ms, "ms warm", AT_LEAST, target)


def _differing_answers(daemon: BenchDaemon, directory: Path, tokens: int) -> int:
    differing = 0
    for number, question in enumerate(QUESTIONS):
        prompt = directory / f"prompt-{number}.txt"
        prompt.write_text(prompt_text(100 + number, words=400 + 150 * number))
        cold = _ask(daemon, prompt, question, tokens)
        warm = _ask(daemon, prompt, question, tokens)
        if not warm["tokens_restored"]:
            raise RuntimeError(f"nothing was restored for question {number}: {warm['restore']['reason']}")
        differing += cold["tokens"] != warm["tokens"]
        progress(f"answer {number}: {len(cold['tokens'])} tokens, {warm['tokens_restored']} restored, equal so far")
    return differing


def _ask(daemon: BenchDaemon, system_file: Path, question: str, tokens: int) -> dict[str, Any]:
    return generate(system_file, question, tokens, "--kvstore", str(daemon.socket_dir))


def _flush(daemon: BenchDaemon) -> None:
    if daemon.admin("Flush", admin_pb2.FlushRequest()).pending_blocks:
        raise RuntimeError("blocks did not reach NVMe")


def _ttft(answer: dict[str, Any]) -> float:
    return float(answer["timings"]["ttft_s"]) * 1e3


def prompt_text(seed: int, words: int = PREFIX_WORDS) -> str:
    chosen = np.random.default_rng(seed).choice(VOCABULARY.split(), words)
    sentences = [" ".join(chosen[start : start + 12]).capitalize() for start in range(0, words, 12)]
    return ". ".join(sentences) + "."


def _memcpy_ms(nbytes: int, pairs: int) -> float:
    """Milliseconds of one copy of `nbytes` from touched memory to touched memory, `pairs` of arrays taking turns."""
    arrays = [(np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(pairs)]
    for destination, _ in arrays:
        destination[:] = 2
    turns = itertools.cycle(arrays)
    return median(time_each(lambda: np.copyto(*next(turns)), 16)) * 1e3


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
