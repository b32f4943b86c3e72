"""The question about vLLM on a GPU without vLLM: what is asked of two engines, when answers are wrong bytes or prove
nothing, and the verdict. Engines that follow a script stand in: vLLM's own are asked in tests/vllm.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.reference.benchmark_scripts import importable
from tests.vllm.engine_process import Answer

BLOCK_TOKENS, TOKEN_BYTES = 16, 1024
KV_BYTES = "stored_bytes"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


def support(name: str) -> Any:
    return importlib.import_module(f"support.{name}")


@dataclass
class Daemon:
    stored: set[tuple[int, ...]] = field(default_factory=set)

    def counted(self, name: str) -> int:
        return TOKEN_BYTES * sum(map(len, self.stored)) if name == KV_BYTES else 0


@dataclass
class ScriptedEngine:
    """Answers by a prompt's sum. `daemon`: None for vLLM alone. `damage` is added where the daemon's blocks are used,
    `drift` to each later answer; a `deaf` one answers all alike, and one that `loses` stores nothing."""

    daemon: Daemon | None = None
    damage: int = 0
    drift: int = 0
    deaf: bool = False
    loses: bool = False
    kept: set[tuple[int, ...]] = field(default_factory=set)
    asked: int = 0
    resets: list[bool] = field(default_factory=list)

    def ask(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        answers = [self._answer(tuple(prompt), max_tokens) for prompt in prompts]
        cached, tokens = [cached for cached, _ in answers], [tokens for _, tokens in answers]
        return Answer(1.0, tokens, [], cached, ["length"] * len(prompts), [0.01 if any(cached) else 0.1], 0)

    def _answer(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, list[int]]:
        whole = prompt[: (len(prompt) - 1) // BLOCK_TOKENS * BLOCK_TOKENS]
        is_own, is_stored = whole in self.kept, self.daemon is not None and whole in self.daemon.stored
        first = (0 if self.deaf else sum(prompt)) + self.drift * self.asked
        first += self.damage if is_stored and not is_own else 0
        self.asked += 1
        self.kept.add(whole)
        if self.daemon is not None and not self.loses:
            self.daemon.stored.add(whole)
        return len(whole) if is_own or is_stored else 0, [first] * max_tokens

    def reset(self, *, connector: bool) -> bool:
        self.resets.append(connector)
        self.kept.clear()
        return len(self.resets) % 2 == 0  # the first time blocks are still in use


def taken(daemon: Daemon, ours: ScriptedEngine, way: Any = None, patience_s: float = 60.0) -> Any:
    turns, small = support("vllm_turns"), support("gpu_answers").SMALL
    room = turns.Room(replace(small, prompts_tokens=(128, 256), rounds=2))
    assert room.shape.token_bytes == TOKEN_BYTES
    way = way or turns.connector()
    waits = {"patience_s": patience_s, "pause": lambda seconds: None}
    return turns.Turns(way, room, daemon.counted, ScriptedEngine(), ours, **waits).taken()


def test_each_prompt_is_asked_cold_of_both_engines_and_warm_behind_a_reset() -> None:
    daemon = Daemon()
    ours = ScriptedEngine(daemon)
    told: list[Any] = []
    support("gpu_answers").listen(told.append)
    found = taken(daemon, ours)
    assert not found.is_over
    assert len(told) == 2 and told[0].figures["256 warm ms"] == pytest.approx(10), "after each round"
    assert {key: len(seconds) for key, seconds in found.seconds.items()} == {
        (way, tokens): 2 for way in ("alone", "cold", "warm", "again") for tokens in (128, 256)
    }
    assert set(found.seconds["warm", 256] + found.seconds["again", 128]) == {0.01}
    assert set(found.seconds["alone", 256] + found.seconds["cold", 128]) == {0.1}
    assert [len(found.rates[name]) for name in ("alone", "cold")] == [2, 2]
    assert found.restored_tokens == 2 * 2 * (128 + 256)
    assert len(found.answers) == 4
    assert set(ours.resets) == {False}, "the connector's own reset would end its use"


def test_the_plugin_also_forgets_its_cpu_tier() -> None:
    daemon = Daemon()
    ours = ScriptedEngine(daemon)
    taken(daemon, ours, support("vllm_turns").plugin(1 << 20))
    assert set(ours.resets) == {True}


def test_an_answer_behind_restored_blocks_that_is_another_one_is_wrong_bytes() -> None:
    daemon, gpu_vllm, turns = Daemon(), support("gpu_vllm"), support("vllm_turns")
    found = taken(daemon, ScriptedEngine(daemon, damage=1))
    assert found.wrong.startswith("behind 128 restored tokens")
    answer = gpu_vllm.judged(turns.connector(), "0.33.0", found)
    assert answer.holds is False and answer.says.startswith("WRONG bytes by the connector of vLLM 0.33.0: behind 128")


@pytest.mark.parametrize(("engine", "why"), [({"drift": 1}, "equal requests differ"), ({"deaf": True}, "same answer")])
def test_answers_that_prove_nothing_are_unknown(engine: dict[str, Any], why: str) -> None:
    daemon, turns = Daemon(), support("vllm_turns")
    found = taken(daemon, ScriptedEngine(daemon, **engine))
    assert why in found.unsure
    answer = support("gpu_vllm").judged(turns.connector(), "0.33.0", found)
    assert answer.holds is None and why in answer.says


def test_blocks_that_are_never_stored_are_no_figure() -> None:
    daemon = Daemon()
    with pytest.raises(RuntimeError, match="0 of 131072 bytes were stored"):
        taken(daemon, ScriptedEngine(daemon, loses=True), patience_s=0.0)


def figures(alone: Sequence[float], warm: Sequence[float], rate: float) -> Any:
    turns = support("vllm_turns")
    found = turns.Found()
    for tokens, alone_s, warm_s in zip((8192, 32768), alone, warm, strict=True):
        for name, seconds in ((turns.ALONE, alone_s), (turns.COLD, alone_s), (turns.WARM, warm_s), (turns.AGAIN, 0.01)):
            found.seconds[name, tokens] = [seconds, seconds, 9.0]
    found.rates.update({turns.ALONE: [100.0], turns.COLD: [rate]})
    return found


@pytest.mark.parametrize(
    ("warm", "rate", "holds"),
    [
        ((0.05, 0.1), 98.0, True),
        ((0.051, 0.1), 98.0, False),
        ((0.05, 0.11), 98.0, False),
        ((0.05, 0.1), 97.0, False),
    ],
)
def test_the_promise_is_of_both_prompts_and_of_throughput(warm: tuple[float, float], rate: float, holds: bool) -> None:
    way = support("vllm_turns").plugin(1 << 20)
    answer = support("gpu_vllm").judged(way, "0.33.0", figures((0.4, 1.5), warm, rate))
    assert answer.holds is holds, answer
    assert answer.says.startswith("the plugin, vLLM 0.33.0: 8192 tokens alone 400 ms")
    assert answer.figures["8192 speed up"] == pytest.approx(0.4 / warm[0])
    assert answer.figures["throughput"] == pytest.approx(rate / 100)


def test_the_shape_is_llama_3_8bs(tmp_path: Path) -> None:
    shape = support("vllm_turns").Shape()
    assert shape.token_bytes == 128 << 10
    assert shape.weights_bytes == pytest.approx(2 * 8.03e9, rel=1e-3)
    shape.write(tmp_path)
    assert '"vocab_size": 128256' in (tmp_path / "config.json").read_text()


def test_memory_that_is_missing_is_named() -> None:
    room = support("vllm_turns").Room(support("gpu_answers").FULL)
    lacking = list(support("gpu_vllm").lacking(room, 40 << 30, of_plugin=True))
    assert lacking[0].endswith("on the device, 40.0 GiB are free")


@pytest.mark.parametrize(("shown", "wanted"), [("", "1"), ("2,3", "3"), ("GPU-a, GPU-b", "GPU-b")])
def test_an_engine_has_the_device_that_is_asked_of_those_that_are_shown(shown: str, wanted: str) -> None:
    assert support("gpu_vllm").shown_alone(1, shown) == wanted


def test_without_vllm_the_question_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVSTORED_VLLM_PYTHON", str(tmp_path / "python"))
    small = support("gpu_answers").SMALL
    answer = support("gpu_vllm").asked(0, small, of_plugin=True)
    assert answer.holds is None
    assert f"no {tmp_path}/python: pip install vllm" in answer.says
    (tmp_path / "python").write_text("#!/bin/sh\necho \"No module named 'vllm'\" >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    assert "No module named 'vllm'; pip install vllm" in support("gpu_vllm").asked(0, small, of_plugin=False).says
