"""The parts that the engine's benchmarks share: the models, the threads, and what makes the two sides comparable.

Owns no measurement. Every comparison with llama.cpp runs on the ggml build that our engine uses, and our kernels then
use no instruction that this build does not.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from kvstore_engine.bench.ggml_build import cpu_features, kernel_environment
from kvstore_engine.ggml import find_library
from kvstore_engine.models.locate import locate

MODEL = "smollm2-135m-instruct"
THREADS = 2


def generate(system_file: Path, question: str, tokens: int, *arguments: str) -> dict[str, Any]:
    """Return the JSON of `kvengine generate` for `question` after the system prompt in `system_file`, with `tokens`
    tokens of answer. Ends the benchmark where it fails.
    """
    command = [
        str(Path(sys.executable).with_name("kvengine")), "generate", "--model", f"{MODEL}:q8_0", "--system-file",
        str(system_file), "--prompt", question, "--max-tokens", str(tokens), "--ignore-eos", "--json", "--quiet",
        "--no-stream", *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"kvengine failed: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def quantisations(quick: bool) -> tuple[str, ...]:
    return ("q4_0",) if quick else ("q4_0", "q8_0")


def model_path(quantisation: str) -> Path:
    return locate(f"{MODEL}:{quantisation}")


def comparable() -> dict[str, str]:
    """Environment of our side."""
    return kernel_environment(cpu_features(find_library()))
