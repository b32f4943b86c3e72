"""The questions of `make gpu-check` about vLLM (benchmarks/support/vllm_turns.py), asked of engines on CPUs: a small
model of dummy weights, DRAM alone, and the plain copy of `host_spec` between vLLM's pool and its CPU tier.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.reference.benchmark_scripts import importable
from tests.vllm.engine_process import EngineProcess
from tests.vllm.test_vllm_connector import BLOCK_TOKENS


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from importable(monkeypatch)


@pytest.mark.parametrize("name", ["plugin", "connector"])
def test_prompts_are_restored_answers_are_equal_and_depend_on_what_was_restored(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, answers, gpu_vllm = (
        importlib.import_module(f"support.{each}") for each in ("vllm_turns", "gpu_answers", "gpu_vllm")
    )
    monkeypatch.setattr(turns, "EngineProcess", lambda log, python, **spec: EngineProcess(log, **spec))  # forked
    here = {"spec_name": "HostTieringSpec", "spec_module_path": "host_spec"}  # beside engine_child.py
    way = turns.plugin(32 << 20, **here) if name == "plugin" else turns.connector()
    found = turns.compared(way, answers.SMALL, one_process=True)
    assert (found.wrong, found.unsure) == ("", "")
    prompts = answers.SMALL.prompts_tokens
    assert found.restored_tokens == 2 * sum(prompts) and not any(tokens % BLOCK_TOKENS for tokens in prompts)
    assert len(found.answers) == len(prompts), "each prompt has an answer of its own, though they end alike"
    judged = gpu_vllm.judged(way, "for CPUs", found)
    assert judged.holds is not None and all(figure > 0 for figure in judged.figures.values()), judged
