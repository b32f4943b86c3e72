"""`generate` in stages with a real daemon: a later engine restores by stages, whatever is missing: the same answer."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore_engine import loaded_model
from kvstore_engine.batching.request import RequestSettings
from kvstore_engine.cli.main import main
from kvstore_engine.generation import Generation, Prompt
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import LoadOptions, fingerprint_of, open_model
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.restore.profile import profile_path
from kvstore_engine.stages import stores
from kvstore_engine.stages.prompts import StagedPrompts
from kvstore_engine.stages.restoration import StageSide
from kvstore_engine.stages.restorer import RestorationRun, StagedRestorer
from kvstore_proto.fingerprint import Fingerprint
from kvstore_proto.v1 import admin_pb2
from kvstore_restore.learned import LearnedCosts, StepFit
from tests.reference.assumed_costs import assume
from tests.reference.running_daemon import RunningDaemon, running_daemon
from tests.reference.skips import skip_without_ggml
from tests.reference.tiny_llama import write_tiny_llama

LAYERS, TOKEN_BYTES = 4, 128  # of one layer's K and V
PROMPT = "the cat sat on the mat and the hat of the rat that ran. " * 16
ANSWER = 30
SETTINGS = RequestSettings(max_tokens=ANSWER, ignore_end=True)
_PROGRAM = """
import pathlib, sys
from kvstore_engine import loaded_model
from kvstore_engine.cli.main import main
loaded_model.cache_root = lambda: pathlib.Path(sys.argv[1])
sys.exit(main(sys.argv[2:]))
"""  # only the profiles: compiled kernels stay in the user's cache


class Engines:
    """Freshly loaded engines of one model. They expect computing to take far longer than loading, and loading so long
    that none counts as stalled: all that is stored is loaded.
    """

    def __init__(self, model: Path, cache: Path) -> None:
        self.model, self.cache = model, cache

    def answer(self, daemon: RunningDaemon | None, stages: int, **more: Any) -> Generation:
        self.expect(stages)
        sockets = None if daemon is None else daemon.socket_dir
        options = LoadOptions(threads=1, kvstore=sockets, warm_up=False, stages=stages, **more)
        with open_model(self.model, options) as loaded:
            return loaded.generator.generate(Prompt(PROMPT), SETTINGS)

    def command(self, daemon: RunningDaemon, *arguments: str) -> list[str]:
        fixed = ["--prompt", PROMPT, "--max-tokens", str(ANSWER), "--ignore-eos", "--threads", "1", "--no-warm-up"]
        return [
            *("generate", "--model", str(self.model), "--json", "--kvstore", str(daemon.socket_dir)),
            *fixed,
            *arguments,
        ]

    def in_a_process(self, daemon: RunningDaemon, *arguments: str) -> tuple[dict[str, Any], str]:
        """Return what `kvengine generate` prints in a process of its own: its JSON, and its summary."""
        command = [sys.executable, "-c", _PROGRAM, str(self.cache), *self.command(daemon, *arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    def profile(self, stage: int, stages: int) -> Path:
        with GGUFFile.open(self.model) as file:
            return profile_path(self.cache, file.weights_digest(), stages, part=f"stage{stage}of{stages}")

    def expect(self, stages: int) -> None:
        for stage in range(stages):
            costs = LearnedCosts()
            assume(costs, [1000.0, 1000.0, 0.0])
            for tier in ("host", "nvme"):
                costs.expect_load(tier, 64 * TOKEN_BYTES, 5.0)
            costs.save(self.profile(stage, stages))

    def forget(self, daemon: RunningDaemon, answer: Generation, stages: int, stage: int, *what: str) -> None:
        """Delete a stage's "kv" or "states" of the prompt and its answer."""
        with open_model(self.model, LoadOptions(threads=1, warm_up=False)) as loaded:
            tokenizer, pool = loaded.generator.tokenizer, loaded.generator.pool
            file = loaded.template_source
            config = ModelConfig.from_gguf(file)
            whole = fingerprint_of(file, config, tokenizer, pool, file.weights_digest())
            tokens = [*tokenizer.encode(PROMPT).tolist(), *answer.tokens]
            prints = dict(zip(("kv", "states"), _prints(whole, config, stages)[stage], strict=True))
        for each in what:
            with daemon.connect(prints[each], staging_bytes=0) as session:
                assert session.delete(tokens).blocks


def _prints(whole: Fingerprint, config: Any, stages: int) -> list[tuple[Fingerprint, Fingerprint | None]]:
    from kvstore_engine.stages.pipeline import stage_layers
    from kvstore_engine.stages.stores import stage_fingerprints

    return stage_fingerprints(whole, stage_layers(config.layers, stages), config.width)


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engines:
    skip_without_ggml()
    cache = tmp_path / "cache"
    monkeypatch.setattr(loaded_model, "cache_root", lambda: cache)
    return Engines(write_tiny_llama(tmp_path / "tiny.gguf", layers=LAYERS), cache)


def _blocks(answer: Generation) -> int:
    """Return the blocks of the prompt, before its last token."""
    blocks = (answer.prompt_tokens - 1) // 64
    assert blocks > 2
    return blocks


def test_a_second_process_restores_by_stages_what_the_first_stored(
    engines: Engines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, trace = engines.answer(None, 1), tmp_path / "trace.json"
    blocks, whole = _blocks(plain), (plain.prompt_tokens + ANSWER - 1) // 64
    with running_daemon() as daemon:
        assert main(engines.command(daemon, "--stages", "2")) == 0
        out, summary = capsys.readouterr()
        cold = json.loads(out.splitlines()[-1])
        assert "0 restored: nothing resident" in summary
        learned = [LearnedCosts.load(engines.profile(stage, 2)).steps.samples for stage in range(2)]
        engines.expect(2)
        warm, summary = engines.in_a_process(daemon, "--stages", "2", "--trace", str(trace))
    assert cold["tokens"] == warm["tokens"] == list(plain.tokens)
    records = cold["restorations"]
    assert [(each["stage"], each["layers"], each["computed"]) for each in records] == [
        (0, [0, 2], blocks),
        (1, [2, 4], blocks),
    ]
    assert cold["tokens_restored"] == 0 and learned == [blocks] * 2
    assert (cold["store"]["stored"], cold["store"]["reason"]) == (2 * whole + blocks, "")
    records = warm["restorations"]
    assert [(each["plan"], each["tiers"], each["loaded"], each["computed"]) for each in records] == [
        ("load", {"host": blocks}, blocks, 0)
    ] * 2
    assert warm["tokens_restored"] == 64 * blocks
    assert warm["bytes_restored"] == 64 * blocks * LAYERS * TOKEN_BYTES
    assert (warm["store"]["stored"], warm["store"]["present"]) == (0, 2 * whole)
    assert "prompt/0, stage 1 (layers 2-3)" in summary
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {f"sequence 1, stage {stage}: restore, load" for stage in range(2)} <= names


def test_a_daemon_that_dies_while_stages_load_costs_only_computing(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines keep expecting slow computing, whatever it takes, and their clock hardly goes on: however long the daemon
    takes to answer, to read and to die, all is found and no load counts as stalled. So a stage computes what it has
    lost alone.
    """
    ticks = count()
    monkeypatch.setattr(stores, "_DEADLINE_S", 60.0)
    monkeypatch.setattr(StepFit, "observe", lambda fit, *step: False)
    monkeypatch.setitem(cast(Any, StagedPrompts.__init__).__kwdefaults__, "clock", lambda: next(ticks) * 1e-9)
    with running_daemon("movement.in_flight=1") as daemon:
        cold = engines.answer(daemon, 2)
        daemon.ask("Flush", admin_pb2.FlushRequest())
        daemon.stop()
        daemon.restart(failpoints="nvme.read=kill@3")
        again = engines.answer(daemon, 2)
        daemon.wait_killed()
    assert again.tokens == cold.tokens
    records = again.restorations
    assert [(each.tiers, each.loaded + each.computed) for each in records] == [
        ({"nvme": _blocks(cold)}, _blocks(cold))
    ] * 2
    lost, computed = sum(each.lost for each in records), sum(each.computed for each in records)
    assert computed >= 2 * _blocks(cold) - 2
    assert 0 <= computed - lost <= 2  # what a stage computed just then is not lost
    assert again.restore.reason == f"{lost} stored blocks of stages could not be loaded"


@pytest.mark.slow
@pytest.mark.parametrize("missing", [("kv",), ("states",), ("kv", "states")])
def test_a_stage_computes_from_stored_states_or_from_those_of_the_stage_before(
    engines: Engines, missing: tuple[str, ...]
) -> None:
    with running_daemon() as daemon:
        cold = engines.answer(daemon, 2)
        engines.forget(daemon, cold, 2, 1, *missing)
        again = engines.answer(daemon, 2)
        healed = engines.answer(daemon, 2)
    blocks = _blocks(cold)
    assert again.tokens == healed.tokens == cold.tokens
    first, second = again.restorations
    assert first.loaded + first.computed == blocks
    if missing == ("kv", "states"):  # the first stage may have computed one before it came
        assert (second.stored, second.computed, second.inputs) == (0, blocks, 0)
        assert first.forwarded == first.loaded
    else:
        assert (first.computed, first.forwarded) == (0, 0)
        assert (second.loaded, second.computed, second.inputs) == (
            (0, blocks, blocks) if missing == ("kv",) else (blocks, 0, 0)
        )
    assert [(each.loaded, each.computed) for each in healed.restorations] == [(blocks, 0)] * 2
    assert (again.store.stored >= blocks) == ("kv" in missing)


def test_three_stages_find_the_hidden_states_of_two_and_nothing_else(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last of three stages begins at the layer where the second of two did. All compute once its states are there,
    or the first two would be done before that on a busy machine.
    """
    begin_step = StagedRestorer._begin_step

    def begin_after_loading(restorer: StagedRestorer, run: RestorationRun, side: StageSide) -> None:
        if all(each.inputs is None for each in run.sides):
            begin_step(restorer, run, side)

    with running_daemon() as daemon:
        two = engines.answer(daemon, 2)
        with monkeypatch.context() as patched:
            patched.setattr(StagedRestorer, "_begin_step", begin_after_loading)
            three = engines.answer(daemon, 3)
        again = engines.answer(daemon, 3)
    blocks = _blocks(two)
    assert two.tokens == three.tokens == again.tokens
    assert [each.layers for each in three.restorations] == [(0, 1), (1, 2), (2, 4)]
    assert [(each.stored, each.loaded, each.computed) for each in three.restorations] == [(0, 0, blocks)] * 3
    first, second, third = (each.inputs for each in three.restorations)
    assert (first, second) == (0, 0) and third > 0
    assert [(each.loaded, each.computed) for each in again.restorations] == [(blocks, 0)] * 3


def test_whole_blocks_and_those_of_stages_are_found_by_their_own_kind(
    engines: Engines, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_daemon() as daemon:
        plain = engines.answer(daemon, 1)
        assert main(engines.command(daemon, "--stages", "2", "--no-hidden-states")) == 0
        staged = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert main(engines.command(daemon, "--stages", "2", "--whole-blocks")) == 0
        whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert staged["tokens"] == whole["tokens"] == list(plain.tokens)
    assert [(each["tiers"], each["computed"]) for each in staged["restorations"]] == [({}, _blocks(plain))] * 2
    assert staged["store"]["stored"] == 2 * ((plain.prompt_tokens + ANSWER - 1) // 64)  # no states among them
    assert whole["store"]["stored"] == 0 and whole["store"]["reason"] == ""
    assert [each["stage"] for each in whole["restorations"]] == [None]


def test_seven_sessions_share_a_mebibyte_of_staging_memory(engines: Engines) -> None:
    with running_daemon("host.staging=1MiB") as daemon:
        answer = engines.answer(daemon, 4)
    whole = (answer.prompt_tokens + ANSWER - 1) // 64
    assert (answer.store.stored, answer.store.reason) == (4 * whole + 3 * _blocks(answer), "")


def test_a_daemon_without_staging_memory_is_said(engines: Engines) -> None:
    with running_daemon("host.staging=1MiB") as daemon, daemon.connect():  # which has it all
        answer = engines.answer(daemon, 2)
    assert answer.tokens == engines.answer(None, 2).tokens
    assert answer.store.stored == 0
    for what in ("stage 0: block 0 of the K/V", "stage 1: block 0 of the hidden states"):
        assert f"{what} was failed: the daemon granted no staging memory" in answer.store.reason
