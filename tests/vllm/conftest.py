"""The fixtures that the vLLM tests share: one daemon, SmolLM2 as vLLM reads it, and engines in processes of their own.

Run them with the Python of the vLLM environment: `.venv-vllm/bin/python -m pytest tests/vllm` (`make test-vllm` makes
it). Elsewhere they are skipped by name. An engine takes half a minute to start, so tests share engines.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reference.running_daemon import RunningDaemon, daemon_directory, ended_with
from tests.vllm.engine_process import FOR_SMALL_MODELS, EngineProcess
from tests.vllm.smollm2 import exported

ROOM = (
    "host.capacity=1GiB",
    "host.staging=192MiB",
    "host.arena=64MiB",
    "limits.staging_per_client=64MiB",
    "limits.max_block=16MiB",
    "nvme.capacity=4GiB",
    "nvme.slab=64MiB",
)
RECORDING = "trace.jsonl.gz"  # in the daemon's directory
SMALL = {"seed": 0, "max_model_len": 2048, "num_gpu_blocks_override": 64}  # two engines at a time need not 4 GiB
PATIENT = {"lookup_deadline_ms": 2000, "load_deadline_ms": 10_000}  # a busy machine shall not make a hit a miss
StartEngine = Callable[..., EngineProcess]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = f"{Path(__file__).parent}/"
    mine = [item for item in items if str(item.path).startswith(here)]
    for item in mine:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.timeout(1500))
        if importlib.util.find_spec("vllm") is None:
            item.add_marker(pytest.mark.skip(reason="vllm is not installed here: make test-vllm runs these"))


@pytest.fixture(scope="session", autouse=True)
def quick_engines() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in FOR_SMALL_MODELS.items():
            patch.setenv(name, os.environ.get(name, value))
        yield


@pytest.fixture(scope="module")
def daemon() -> Iterator[RunningDaemon]:
    """Not `running_daemon`: the tests leave damaged blocks on its NVMe, and its closing check would find them."""
    with daemon_directory() as directory:
        started = RunningDaemon(directory, *ROOM, f"daemon.record={directory}/{RECORDING}")
        with ended_with(started):
            started.start()
            yield started


@pytest.fixture(scope="module")
def start_engine(daemon: RunningDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartEngine]:
    """start_engine(dtype, ...): the engines of a module end with it at the latest."""
    engines: list[EngineProcess] = []
    logs = tmp_path_factory.mktemp("engines")

    def start(dtype: str = "bfloat16", *, extra: dict[str, Any] | None = None, **spec: Any) -> Any:
        extra_config = {"socket": str(daemon.socket_dir), **PATIENT, **(extra or {})}
        spec["transfer"] = {"kv_connector_extra_config": extra_config, **spec.get("transfer", {})}
        if "model" not in spec:
            spec["model"] = str(exported(dtype))
        engine = EngineProcess(logs / f"engine-{len(engines)}.log", dtype=dtype, **{**SMALL, **spec})
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
