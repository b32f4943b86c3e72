"""Models with several kinds of state in real engines: small ones with random weights, in the shapes of gpt-oss, Gemma,
DeepSeek and Qwen3-Next. What a second process restores must be what vLLM's own prefix cache would have held.

An answer is compared with one of the first engine behind its own prefix cache, cut at the same place: the beginning of
the prompt was asked before, under a salt of its own, so that neither cache mixes with what is tested. With latent
attention vLLM for CPUs without AMX has no prefix cache, and cuts no prompt: there the answers must be near.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.reference.running_daemon import RunningDaemon, eventually
from tests.vllm.conftest import StartEngine
from tests.vllm.engine_process import Answer, EngineProcess
from tests.vllm.stand_ins import VOCABULARY, written
from tests.vllm.test_vllm_connector import flip_a_byte, flush_and_drop_dram, kvctl

NEW_TOKENS, LONG, TAIL = 8, 1500, 100
BLOCK_TOKENS = {"gpt_oss": 128, "gemma": 256, "deepseek": 16, "qwen3_next": 256}
SPLITS, OF_ONE, NEAR = int(os.environ.get("KVSTORED_VLLM_SPLITS", "6")), 8, 0.05  # OF_ONE: begin alike
SETTINGS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"max_num_batched_tokens": 128},  # what an expert computes depends on how many tokens come together
    "gemma": {},
    "deepseek": {"num_gpu_blocks_override": 400},
    "qwen3_next": {"max_num_batched_tokens": 256},  # states at all ends of blocks, as a step ends there
}


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, tokens)]


def asked(engine: EngineProcess, prompt: list[int], salt: str = "", tokens: int = NEW_TOKENS) -> Answer:
    fields = {"prompt_fields": {"cache_salt": salt}} if salt else {}
    return engine.ask([prompt], tokens, sampling={"logprobs": 0, "detokenize": False}, **fields)


@pytest.fixture(scope="module")
def start(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stand-ins")

    def started(name: str) -> EngineProcess:
        spec = {"num_gpu_blocks_override": 96, "skip_tokenizer_init": True, "one_process": True, **SETTINGS[name]}
        return start_engine(
            model=str(written(name, folder)), extra={"always_load": True, "reuse_wait_ms": 10_000}, **spec
        )

    return started


@pytest.mark.parametrize("name", BLOCK_TOKENS)
def test_a_shared_prefix_that_ends_anywhere_is_restored_and_answers_are_equal(
    name: str, daemon: RunningDaemon, start: Any
) -> None:
    size, random = BLOCK_TOKENS[name], np.random.default_rng(7)
    stored = [prompt_of(1000 + first, LONG) for first in range(0, SPLITS, OF_ONE)]
    shared = [int(tokens) for tokens in random.integers(size, LONG, SPLITS)]
    prompts = [
        stored[number // OF_ONE][:tokens] + prompt_of(2000 + number, TAIL) for number, tokens in enumerate(shared)
    ]
    cuts = [tokens // size * size for tokens in shared]
    with start(name) as engine:
        assert all(asked(engine, prompt).cached == [0] for prompt in stored)
        expected = []
        for number, (prompt, cut) in enumerate(zip(prompts, cuts, strict=True)):
            asked(engine, prompt[: cut + 1], f"salt {number}", 1)
            expected.append(asked(engine, prompt, f"salt {number}"))
            assert expected[-1].cached == [cut] or name == "deepseek", "vLLM's own prefix cache"
    with start(name) as engine:
        loaded = 0
        for prompt, known in zip(prompts, expected, strict=True):
            answer = asked(engine, prompt)
            assert answer.finish == ["length"]
            if name == "deepseek":
                assert answer.logprobs[0][0] == pytest.approx(known.logprobs[0][0], abs=NEAR)
            else:
                assert (answer.cached, answer.tokens, answer.logprobs) == (known.cached, known.tokens, known.logprobs)
                assert engine.reset()
            loaded += answer.cached[0]
        assert loaded == sum(cuts), "every full block"
        if name == "gpt_oss":
            damaged_window(daemon, engine, stored[0])


def damaged_window(daemon: RunningDaemon, engine: EngineProcess, long: list[int]) -> None:
    """A block of a window that is damaged on NVMe: the request is computed whole, and does not fail."""
    prompt = long[:1000] + prompt_of(900, TAIL)
    cold = asked(engine, prompt, "cold")
    assert engine.reset() and cold.cached == [0]
    flush_and_drop_dram(daemon)
    blocks = kvctl(daemon, "blocks", "--tier", "nvme", "--limit", "1000")["blocks"]
    before = daemon.status().counters.get("corrupt_blocks", 0)
    for block in blocks:
        if block["depth"] in (5, 6):
            path, _, offset = str(block["location"]).rpartition(":")
            flip_a_byte(Path(path), int(offset) + 4096 + int(block["payload_bytes"]) // 2)
    answer = asked(engine, prompt)
    assert (answer.finish, answer.tokens) == (["length"], cold.tokens)
    assert eventually(lambda: daemon.status().counters.get("corrupt_blocks", 0) > before)
