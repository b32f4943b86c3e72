"""Weights in the store, loaded by real vLLM: bitwise what its default loader loads, and named by the catalogue."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_client.objects.sources import weights_source
from kvstore_client.objects.store import STAGING_BYTES, open_objects
from kvstore_client.objects.tables import array_source
from tests.reference.running_daemon import RunningDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.engine_process import REPOSITORY
from tests.vllm.stand_ins import VOCABULARY, written


def loaded(model: Path, **arguments: Any) -> dict[str, Any]:
    spec = {"model": str(model), "dtype": "bfloat16", "skip_tokenizer_init": True, **arguments}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.loaded_tensors"], input=json.dumps(spec), text=True, capture_output=True,
        cwd=REPOSITORY, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written("qwen3_next", tmp_path_factory.mktemp("models"))


def from_store(daemon: RunningDaemon, name: str, **more: str) -> dict[str, Any]:
    where = {"object": name, "socket": str(daemon.socket_dir), **more}
    return {"load_format": "kvstored", "model_loader_extra_config": where}


def test_all_tensors_are_those_of_the_default_loader(daemon: RunningDaemon, model: Path) -> None:
    rows = np.random.default_rng(5).integers(0, 1 << 14, (VOCABULARY, 64), np.uint16)
    with open_objects(daemon.socket_dir, staging_bytes=STAGING_BYTES) as store, weights_source(model) as source:
        digest = store.put("weights", source).version.digest.hex()
        table = store.put("rows", array_source(rows, dtype="BF16")).version.digest.hex()
    default, ours = loaded(model), loaded(model, **from_store(daemon, "weights"))
    assert ours["digests"] == default["digests"]
    assert not default["shared"] and ours["weights"] == f"object {digest}"
    shared, whole = (
        set(ours["shared"]),
        {"lm_head.weight", "model.norm.weight", "model.layers.3.self_attn.o_proj.weight"},
    )
    fused = {name for name in shared if name.endswith(("qkv_proj.weight", "w13_weight"))}
    assert whole <= shared and not fused
    print("after packing:", ours["shared_after"])
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= set(ours["shared_after"])

    name = "model.embed_tokens.weight"
    with_table = loaded(model, **from_store(daemon, "weights@1", tables=f"{name}=rows"))
    assert with_table["weights"] == f"object {digest} {name}={table}"
    changed = {key for key, each in with_table["digests"].items() if each != default["digests"][key]}
    assert changed == {name} and name in with_table["shared_after"]


def test_an_engine_answers_from_it_and_its_blocks_are_of_this_version(
    daemon: RunningDaemon, start_engine: StartEngine, model: Path
) -> None:
    prompt = np.random.default_rng(1).integers(10, VOCABULARY, 600).tolist()
    with open_objects(daemon.socket_dir, staging_bytes=STAGING_BYTES) as store, weights_source(model) as source:
        store.put("served", source)

    def ask(**more: Any) -> Any:
        engine = start_engine(model=str(model), skip_tokenizer_init=True, one_process=True, **more)
        found = engine.ask([prompt], 8, sampling={"logprobs": 1, "detokenize": False})
        engine.close()
        return found

    by_file, first, again = ask(), ask(**from_store(daemon, "served")), ask(**from_store(daemon, "served"))
    assert (first.tokens, first.logprobs) == (by_file.tokens, by_file.logprobs)
    assert (first.cached, again.tokens) == ([0], first.tokens) and again.cached[0] > 0
