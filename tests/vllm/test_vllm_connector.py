"""The connector inside real vLLM engines, SmolLM2 on CPUs, with a real daemon.

The order matters: the engines are shared, and the daemon is damaged, killed and frozen at the end. What an answer must
be equal to was computed without the store, and with the same split of the prompt into what is cached and what is
computed: in bfloat16 another split alone may change a token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvstore_simulator.readers import ReadOptions, read_trace
from tests.reference.running_daemon import RunningDaemon, eventually
from tests.vllm.conftest import RECORDING, StartEngine
from tests.vllm.engine_process import Answer, EngineProcess

PROMPT_TOKENS = 1000
BLOCK_TOKENS = 128  # vLLM's own default on CPUs
CACHED_TOKENS = 7 * BLOCK_TOKENS
NEW_TOKENS = 8
NAMES = ("plain", "salted", "shared", "batch", "layers", "broken", "damaged", "lost", "frozen")


@dataclass(frozen=True)
class Known:
    """A prompt and what engines without a hit answer: computed whole, and computed behind vLLM's own prefix cache."""

    prompt: list[int]
    cold: Answer
    split: Answer


def prompt_of(name: str, tokens: int = PROMPT_TOKENS) -> list[int]:
    seed = list(name.encode())
    return [int(token) for token in np.random.default_rng(seed).integers(100, 40_000, tokens)]


@pytest.fixture(scope="module")
def known(daemon: RunningDaemon, start_engine: StartEngine) -> dict[str, Known]:
    """Return what the first engine answered and stored; it has ended."""
    answers = {}
    with start_engine() as engine:
        for name in NAMES:
            prompt = prompt_of(name)
            fields = {"prompt_fields": {"cache_salt": "one"}} if name == "salted" else {}
            cold = engine.ask([prompt], NEW_TOKENS, **fields)
            answers[name] = Known(prompt, cold, engine.ask([prompt], NEW_TOKENS, **fields))
            assert (cold.cached, answers[name].split.cached) == ([0], [CACHED_TOKENS])
        assert eventually(lambda: daemon.tiers()["host"].blocks == 7 * len(NAMES))
    return answers


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file that `told_connector` reads at each load."""
    with pytest.MonkeyPatch.context() as patch:
        place = tmp_path_factory.mktemp("told") / "told.json"
        patch.setenv("KVSTORED_TOLD", str(place))
        yield place


@pytest.fixture(scope="module")
def reader(known: dict[str, Known], start_engine: StartEngine, told: Path) -> Iterator[EngineProcess]:
    """A second engine process: its own prefix cache is empty."""
    transfer = {"kv_connector": "ToldConnector", "kv_connector_module_path": "told_connector"}
    with start_engine(transfer=transfer) as engine:
        yield engine


def test_the_daemon_received_the_lengths_of_the_answers(daemon: RunningDaemon, known: dict[str, Known]) -> None:
    """Each of an answer at least once: a report whose reply comes late is sent again."""

    def hinted() -> set[tuple[int, int, int]]:
        trace = read_trace(daemon.directory / RECORDING, "kvstored", ReadOptions(), lambda done, total: None)
        return {(each.block, each.answer_tokens, int(trace.depths[each.block])) for each in trace.hints}

    assert eventually(lambda: len(hinted()) >= len(known))
    assert {told[1:] for told in hinted()} == {(NEW_TOKENS, CACHED_TOKENS // BLOCK_TOKENS - 1)}
    assert len(hinted()) == len(known)


def test_a_second_process_restores_and_answers_the_same(reader: EngineProcess, known: dict[str, Known]) -> None:
    answer = reader.ask([known["plain"].prompt], NEW_TOKENS)
    assert (answer.cached, answer.finish) == ([CACHED_TOKENS], ["length"])
    assert answer.tokens == known["plain"].split.tokens


def test_another_cache_salt_is_another_prefix(reader: EngineProcess, known: dict[str, Known]) -> None:
    prompt = known["salted"].prompt
    assert reader.ask([prompt], 1).cached == [0]
    assert reader.ask([prompt], 1, prompt_fields={"cache_salt": "two"}).cached == [0]
    answer = reader.ask([prompt], NEW_TOKENS, prompt_fields={"cache_salt": "one"})
    assert answer.cached == [CACHED_TOKENS]
    assert answer.tokens == known["salted"].split.tokens


def test_a_prompt_that_leaves_a_stored_one_gets_the_common_blocks(
    reader: EngineProcess, known: dict[str, Known]
) -> None:
    common = known["shared"].prompt[: 4 * BLOCK_TOKENS + 40]
    answer = reader.ask([common + prompt_of("elsewhere", 400)], 2)
    assert (answer.cached, answer.finish) == ([4 * BLOCK_TOKENS], ["length"])


def test_requests_of_one_batch_that_share_a_prefix(reader: EngineProcess, known: dict[str, Known]) -> None:
    prompt = known["batch"].prompt
    answer = reader.ask([prompt, prompt[: 4 * BLOCK_TOKENS + 1] + prompt_of("other", 100)], NEW_TOKENS)
    assert answer.cached == [CACHED_TOKENS, 4 * BLOCK_TOKENS]
    assert answer.finish == ["length", "length"]


def test_log_probabilities_of_the_prompt_are_computed(reader: EngineProcess, known: dict[str, Known]) -> None:
    answer = reader.ask([known["shared"].prompt], 2, sampling={"prompt_logprobs": 1})
    assert answer.finish == ["length"]


def test_a_layer_is_computed_before_later_ones_are_loaded(
    reader: EngineProcess, known: dict[str, Known], told: Path
) -> None:
    told.write_text('{"gated": true}')
    answer = reader.ask([known["layers"].prompt], NEW_TOKENS)
    told.unlink()
    assert (answer.cached, answer.finish) == ([CACHED_TOKENS], ["length"])
    assert answer.tokens == known["layers"].split.tokens
    assert "not restored" not in reader.log.read_text(errors="replace"), "vLLM counts what it computes as cached, too"


def test_a_layer_that_cannot_be_loaded_behind_computed_ones_costs_a_miss(
    reader: EngineProcess, known: dict[str, Known], told: Path
) -> None:
    told.write_text('{"breaks_at": 7}')
    answer = reader.ask([known["broken"].prompt], NEW_TOKENS)
    told.unlink()
    assert "blocks are not restored: a layer is broken" in reader.log.read_text(errors="replace")
    assert answer.finish == ["length"]
    assert answer.tokens == known["broken"].cold.tokens


def test_a_damaged_block_in_the_middle_is_computed_and_no_request_fails(
    daemon: RunningDaemon, reader: EngineProcess, known: dict[str, Known]
) -> None:
    flush_and_drop_dram(daemon)
    for block in kvctl(daemon, "blocks", "--tier", "nvme", "--limit", "1000")["blocks"]:
        if block["depth"] == 3:
            path, _, offset = block["location"].rpartition(":")
            flip_a_byte(Path(path), int(offset) + 4096 + block["payload_bytes"] // 2)
    answer = reader.ask([known["damaged"].prompt], NEW_TOKENS)
    assert answer.finish == ["length"]
    assert answer.tokens[0] in (known["damaged"].split.tokens[0], known["damaged"].cold.tokens[0])
    assert daemon.status().counters["corrupt_blocks"] >= 1
    assert reader.ask([known["damaged"].prompt], NEW_TOKENS).tokens[0] == answer.tokens[0]


def test_a_daemon_that_stands_still_costs_no_request(
    daemon: RunningDaemon, reader: EngineProcess, known: dict[str, Known]
) -> None:
    with daemon.frozen():
        answer = reader.ask([known["frozen"].prompt], NEW_TOKENS)
    assert (answer.finish, answer.cached) == (["length"], [0])
    assert answer.tokens == known["frozen"].cold.tokens


def test_a_killed_daemon_costs_no_request_and_is_used_again_when_it_is_back(
    daemon: RunningDaemon, reader: EngineProcess, known: dict[str, Known]
) -> None:
    daemon.kill9()
    (daemon.directory / RECORDING).unlink()  # the next one would overwrite none
    answer = reader.ask([known["lost"].prompt], NEW_TOKENS)
    assert (answer.finish, answer.cached) == (["length"], [0])
    assert answer.tokens == known["lost"].cold.tokens
    daemon.restart()
    fresh = iter(prompt_of(f"new-{number}") for number in range(100))
    stored = daemon.tiers()["nvme"].blocks

    def stores_again() -> bool:
        reader.ask([next(fresh)], 1)
        return bool(daemon.tiers()["host"].blocks > 0 and daemon.tiers()["nvme"].blocks >= stored)

    assert eventually(stores_again, 120.0)


def test_another_dtype_never_hits(daemon: RunningDaemon, start_engine: StartEngine, known: dict[str, Known]) -> None:
    """And preemption, chunked prefill, blocks that decoding fills: what they stored is what a whole prefill computes.

    The pool is too small for four requests at once (each needs a third block in the midst of its answer, and there are
    eight), and prefill takes steps of 96 tokens.
    """
    small = {"max_model_len": 512, "num_gpu_blocks_override": 9, "max_num_batched_tokens": 96, "max_num_seqs": 4}
    small["one_process"] = True
    prompts = [prompt_of(f"preempted-{number}", 200) for number in range(4)]
    with start_engine("float32", **small) as engine:
        assert engine.ask([known["plain"].prompt[:500]], 1).cached == [0]
        together = engine.ask(prompts, 100)
        assert together.finish == ["length"] * 4
        assert together.preemptions > 0
    whole = [prompt + tokens for prompt, tokens in zip(prompts, together.tokens, strict=True)]
    with start_engine("float32", **small) as engine:
        for sequence in whole:
            answer = engine.ask([sequence[:280]], 20)
            assert answer.cached == [2 * BLOCK_TOKENS]
            assert answer.tokens[0] == sequence[280:300]


def kvctl(daemon: RunningDaemon, *arguments: str) -> dict[str, list[dict[str, int | str]]]:
    command = [str(Path(sys.executable).with_name("kvctl")), "--socket-dir", str(daemon.socket_dir), "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    answer: dict[str, list[dict[str, int | str]]] = json.loads(done.stdout)
    return answer


def flush_and_drop_dram(daemon: RunningDaemon) -> None:
    assert not kvctl(daemon, "flush")["pending_blocks"]
    daemon.drop("host")


def flip_a_byte(path: Path, offset: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ 0x40]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
