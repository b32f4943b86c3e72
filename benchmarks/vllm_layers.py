"""vLLM on CPUs: what is gained where a layer is computed while later ones are still being restored?

SmolLM2-135M in one engine, a real daemon. Each prompt begins with 512 stored tokens, which are in DRAM, and ends with
as many new ones: one step restores the first and computes the others. A pause before each layer, in which no processor
works, makes restoring take as long as computing does. Three ways take turns: by layer, as the connector does it; one
after the other, where the step begins once all layers are there; and without pauses, which is the time of computing.
The figure is the median over turns of how much longer the second takes to the first token than the first.

Needs the environment that `make test-vllm` makes (.venv-vllm, or KVSTORED_VLLM_PYTHON), and runs under the main one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from support import vllm_engine
from support.daemon import bench_daemon
from support.report import AT_LEAST, Row, main, median, progress
from support.vllm_engine import EngineProcess

STORED, NEW = 512, 512
LAYERS = 30  # of the model
BY_LAYER, IN_TURN, COMPUTING = "by layer", "one after the other", "computing"
SETTINGS = {"always_load": True, "lookup_deadline_ms": 5000, "load_deadline_ms": 60_000, "beside_ms": 60_000}


def measure(quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="kvlayers-") as name, bench_daemon("host.capacity=1GiB") as daemon:
        told = Path(name) / "told.json"
        os.environ["KVSTORED_TOLD"] = str(told)
        model, extra = vllm_engine.model(), {"socket": str(daemon.socket_dir), **SETTINGS}
        with vllm_engine.started(Path(name) / "stores", model, extra) as engine:
            engine.ask([_tokens(0, STORED)], 1)
        transfer: dict[str, Any] = {
            "kv_connector": "ToldConnector",
            "kv_connector_module_path": "told_connector",  # in tests/vllm
            "kv_role": "kv_consumer",
            "kv_connector_extra_config": extra,
        }
        with vllm_engine.started(Path(name) / "loads", model, None, transfer=transfer) as engine:
            turns = Turns(engine, told)
            return rows_of([turns.taken() for _ in range(4 if quick else 11)])


class Turns:
    """The turns of the three ways in one engine. `told`: the file that its connector reads."""

    def __init__(self, engine: EngineProcess, told: Path) -> None:
        self._engine, self._told = engine, told
        self._asked, self._layer_s = 0, 0.0
        computing = [self._first_token_s(COMPUTING) for _ in range(4)]
        self._layer_s = median(computing[1:]) / LAYERS

    def taken(self) -> dict[str, float]:
        """Return the seconds to the first token by way. The order changes from turn to turn."""
        ways = [BY_LAYER, IN_TURN, COMPUTING]
        first = self._asked % len(ways)
        found = {way: self._first_token_s(way) for way in [*ways[first:], *ways[:first]]}
        self._asked += 1
        progress(", ".join(f"{way} {found[way]:.2f} s" for way in ways))
        return found

    def _first_token_s(self, way: str) -> float:
        layer_s = 0.0 if way == COMPUTING else self._layer_s
        self._told.write_text(json.dumps({"layer_s": layer_s, "in_turn": way == IN_TURN}))
        self._asked += 1
        while not self._engine.reset():
            time.sleep(0.05)
        answer = self._engine.ask([_tokens(0, STORED) + _tokens(self._asked, NEW)], 1)
        if answer.cached != [STORED]:
            raise SystemExit(f"{answer.cached[0]} of {STORED} tokens were restored")
        return answer.ttft_s[0] or answer.wall_s


def rows_of(turns: list[dict[str, float]]) -> list[Row]:
    computing_s = median([turn[COMPUTING] for turn in turns])
    loading_s = median([turn[IN_TURN] - turn[COMPUTING] for turn in turns])
    gain = median([turn[IN_TURN] / turn[BY_LAYER] for turn in turns])
    best_s = max(computing_s + loading_s / LAYERS, loading_s + computing_s / LAYERS)
    return [
        Row("vllm_layers_overlapped", gain, "x", 1.0, "one after the other", AT_LEAST, 1.2,
            possible=(computing_s + loading_s) / best_s, possible_name="both at full speed"),
        Row("vllm_layers_loading", loading_s, "s", computing_s, "s computing"),
    ]  # fmt: skip


def _tokens(seed: int, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(100, 40_000, count)]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
