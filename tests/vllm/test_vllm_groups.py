"""Models with several kinds of state in real engines: small ones with random weights, in the shapes of gpt-oss, Gemma,
DeepSeek and Qwen3-Next. What a second process restores must be what vLLM's own prefix cache would have held.

An answer is compared with one of the first engine behind its own prefix cache, cut at the same place: the beginning of
the prompt was asked before, under a salt of its own, so that neither cache mixes with what is tested. Engines take
steps of one block: the bits of a token depend on how many are computed with it. Without AMX vLLM for CPUs refuses a
prefix cache and cut prompts with latent attention: the first engine has both (`cuts_latent`), the second takes what is
left behind a cut in one step, as the first did.
"""

from __future__ import annotations

import os
from functools import partial
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
SPLITS, OF_ONE = int(os.environ.get("KVSTORED_VLLM_SPLITS", "6")), 20  # OF_ONE: begin alike
SEED = int(os.environ.get("KVSTORED_VLLM_SEED", "0"))  # with another one prompts and splits are others
ALL_IS_KEPT = {  # however busy the machine is, a deadline that passed is no miss
    "always_load": True, "connect_timeout_ms": 60_000, "lookup_deadline_ms": 60_000, "load_deadline_ms": 60_000,
    "beside_deadline_ms": 60_000, "save_deadline_ms": 60_000, "reuse_wait_ms": 60_000,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    name: {"max_num_batched_tokens": tokens, "num_gpu_blocks_override": 400 if name == "deepseek" else 96}
    for name, tokens in BLOCK_TOKENS.items()
}


def prompt_of(seed: int, tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng([SEED, seed]).integers(3, VOCABULARY, tokens)]


def asked(engine: EngineProcess, prompt: list[int], salt: str = "", tokens: int = NEW_TOKENS) -> Answer:
    fields = {"prompt_fields": {"cache_salt": salt}} if salt else {}
    return engine.ask([prompt], tokens, sampling={"logprobs": 0, "detokenize": False}, **fields)


@pytest.fixture(scope="module")
def start(start_engine: StartEngine, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("stand-ins")

    def started(name: str, **more: Any) -> EngineProcess:
        spec = {"skip_tokenizer_init": True, "one_process": True, **SETTINGS[name]}
        return start_engine(model=str(written(name, folder)), extra=ALL_IS_KEPT, **spec, **more)

    return started


@pytest.mark.timeout(1500 + 10 * SPLITS)
@pytest.mark.parametrize("name", BLOCK_TOKENS)
def test_a_shared_prefix_that_ends_anywhere_is_restored_and_answers_are_equal(
    name: str, daemon: RunningDaemon, start: Any
) -> None:
    size, random = BLOCK_TOKENS[name], np.random.default_rng([SEED, 7])
    stored = [prompt_of(1000 + first, LONG) for first in range(0, SPLITS, OF_ONE)]
    shared = [int(tokens) for tokens in random.integers(size, LONG, SPLITS)]
    cuts = [tokens // size * size for tokens in shared]
    prompts = [
        stored[number // OF_ONE][:tokens]
        + prompt_of(2000 + number, size - tokens % size if name == "deepseek" else TAIL)
        for number, tokens in enumerate(shared)
    ]
    expected = {}
    with start(name, cuts_latent=True) as engine:
        for prompt in stored:
            assert asked(engine, prompt).cached == [0]
            assert eventually(partial(is_whole, engine, prompt, LONG // size * size), 120.0), "it is not stored whole"
        for number in sorted(range(SPLITS), key=lambda number: (number // OF_ONE, cuts[number])):
            prompt, cut, salt = prompts[number], cuts[number], f"salt {number // OF_ONE}"
            asked(engine, prompt[: cut + 1], salt, 1)  # behind what was asked of this prefix already
            expected[number] = asked(engine, prompt, salt)
            assert expected[number].cached == [cut], "vLLM's own prefix cache"
    with start(name) as engine:
        for number, prompt in enumerate(prompts):
            answer, known = asked(engine, prompt), expected[number]
            assert (answer.finish, answer.cached) == (["length"], [cuts[number]]), "every full block"
            assert (answer.tokens, answer.logprobs) == (known.tokens, known.logprobs), number
            assert engine.reset()
        if name == "gpt_oss":
            damaged_window(daemon, engine, stored[0])


def is_whole(engine: EngineProcess, prompt: list[int], tokens: int) -> bool:
    """Return whether all blocks come back. What an engine could not store in time it stores when it is asked again."""
    return engine.reset() and asked(engine, prompt, tokens=1).cached == [tokens]


def damaged_window(daemon: RunningDaemon, engine: EngineProcess, long: list[int]) -> None:
    """A block of a window that is damaged on NVMe: the request is computed whole, and does not fail."""
    prompt = long[:1000] + prompt_of(900, TAIL)
    cold = asked(engine, prompt, "cold")
    assert engine.reset() and cold.cached == [0]
    flush_and_drop_dram(daemon)
    blocks = kvctl(daemon, "blocks", "--tier", "nvme", "--limit", "100000")["blocks"]
    before = daemon.status().counters.get("corrupt_blocks", 0)
    for block in blocks:
        if block["depth"] in (5, 6):
            path, _, offset = str(block["location"]).rpartition(":")
            flip_a_byte(Path(path), int(offset) + 4096 + int(block["payload_bytes"]) // 2)
    answer = asked(engine, prompt)
    assert (answer.finish, answer.tokens) == (["length"], cold.tokens)
    assert eventually(lambda: daemon.status().counters.get("corrupt_blocks", 0) > before)
