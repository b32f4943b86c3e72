"""Our tier inside real vLLM engines, SmolLM2 on CPUs, with a real daemon: everything but the device's copy.

What an answer must be equal to was computed with the same split of the prompt into what is cached and what is computed.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.reference.running_daemon import RunningDaemon, eventually
from tests.vllm.conftest import PATIENT, RECORDING, SMALL
from tests.vllm.engine_process import EngineDied, EngineProcess
from tests.vllm.smollm2 import exported
from tests.vllm.test_vllm_connector import prompt_of

BLOCK_TOKENS = 128
PROMPTS = [prompt_of("tiered"), prompt_of("tiered-other", 500)]
CACHED = [7 * BLOCK_TOKENS, 3 * BLOCK_TOKENS]
NEW_TOKENS = 16


def transfer(daemon: RunningDaemon, connector: str = "KVStoreOffloadingConnector", **tier: Any) -> dict[str, Any]:
    deadlines = {"lookup_deadline_ms": PATIENT["lookup_deadline_ms"], "load_deadline_ms": PATIENT["load_deadline_ms"]}
    return {
        "kv_connector": connector,
        "kv_connector_module_path": "kvstore_connectors.vllm_tier",
        "kv_connector_extra_config": {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "host_spec",  # beside engine_child.py
            "cpu_bytes_to_use": 256 << 20,
            "secondary_tiers": [
                {
                    "type": "KVStoreTier",
                    "module_path": "kvstore_connectors.vllm_tier",
                    "socket": str(daemon.socket_dir),
                    **deadlines,
                    **tier,
                }
            ],
        },
    }


def start(tmp_path: Any, transfer: dict[str, Any], dtype: str = "bfloat16", **spec: Any) -> EngineProcess:
    model = str(exported(dtype))
    return EngineProcess(tmp_path / "engine.log", model=model, dtype=dtype, transfer=transfer, **SMALL, **spec)


def test_a_restarted_engine_loads_through_vllms_cpu_tier_and_answers_the_same(
    daemon: RunningDaemon, tmp_path: Any
) -> None:
    chunks = sum(CACHED) // BLOCK_TOKENS
    with start(tmp_path, transfer(daemon)) as engine:
        assert [engine.ask([prompt], NEW_TOKENS).cached for prompt in PROMPTS] == [[0], [0]]
        split = [engine.ask([prompt], NEW_TOKENS) for prompt in PROMPTS]  # behind vLLM's own prefix cache
        assert eventually(lambda: daemon.tiers()["host"].blocks >= chunks)
    with start(tmp_path, transfer(daemon)) as engine:
        for prompt, cached, cold in zip(PROMPTS, CACHED, split, strict=True):
            answer = engine.ask([prompt], NEW_TOKENS)
            assert (answer.cached, answer.finish) == ([cached], ["length"])
            assert answer.tokens == cold.tokens
        salted = engine.ask([PROMPTS[0]], 1, prompt_fields={"cache_salt": "other"})
        assert salted.cached == [0]
        daemon.kill9()
        (daemon.directory / RECORDING).unlink()  # the next one would overwrite none
        lost = engine.ask([prompt_of("tiered-lost")], NEW_TOKENS)
        assert (lost.cached, lost.finish) == ([0], ["length"])
        daemon.restart()
    with start(tmp_path, transfer(daemon), "float32", one_process=True) as engine:
        assert engine.ask([PROMPTS[0]], 1).cached == [0], "another dtype is another namespace"


def test_an_engine_whose_weights_are_not_named_does_not_start(daemon: RunningDaemon, tmp_path: Any) -> None:
    plain = transfer(daemon, "OffloadingConnector") | {"kv_connector_module_path": None}
    with pytest.raises(EngineDied, match="KVStoreTier does not know the model's weights"):
        start(tmp_path, plain, one_process=True)
