"""vLLM engines in processes of their own, with SmolLM2-135M and, if asked for, kvstored's connector.

They run by KVSTORED_VLLM_PYTHON, else in the environment that `make test-vllm` makes (.venv-vllm), else by the Python
that the benchmark itself runs by, if vLLM is installed there.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY))
from tests.vllm.engine_process import (  # noqa: E402  # needs the line above
    FOR_SMALL_MODELS,
    Answer,
    EngineDied,
    EngineProcess,
)

__all__ = ["FOR_SMALL_MODELS", "PYTHON", "Answer", "EngineDied", "EngineProcess", "model", "started"]


def _python() -> Path:
    made = REPOSITORY / ".venv-vllm" / "bin" / "python"
    is_here = not made.exists() and importlib.util.find_spec("vllm") is not None
    return Path(os.environ.get("KVSTORED_VLLM_PYTHON", sys.executable if is_here else made))


PYTHON = _python()


def model(dtype: str = "bfloat16") -> str:
    """The folder of SmolLM2 as vLLM reads it, in "bfloat16" or "float32"; the first time it is fetched and converted.
    SystemExit without vLLM."""
    if not PYTHON.exists():
        raise SystemExit(f"there is no {PYTHON}: make test-vllm makes it, or set KVSTORED_VLLM_PYTHON")
    command = [str(PYTHON), "-m", "tests.vllm.smollm2", dtype]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit("the model could not be converted; what went wrong stands above")
    return done.stdout.splitlines()[-1]


def started(
    log: Path, model: str, settings: Mapping[str, Any] | None, *, pool_tokens: int = 8192, **arguments: Any
) -> EngineProcess:
    """An engine that answers. `settings`: of the connector, None for none. `pool_tokens`: a pool of the default size is
    2 GiB. `arguments`: of `vllm.LLM`."""
    spec = {
        "model": model,
        "dtype": "bfloat16",
        "max_model_len": 4096,
        "num_gpu_blocks_override": pool_tokens // arguments.get("block_size", 128),
        **arguments,
    }
    if settings is not None:
        spec["transfer"] = {"kv_connector_extra_config": dict(settings)}
    return EngineProcess(log, python=str(PYTHON), **spec)
