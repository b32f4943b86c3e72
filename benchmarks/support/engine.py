"""What the engine's benchmarks share: the models, the threads, and what makes the two sides comparable.

Owns no measurement. Every comparison with llama.cpp runs on the ggml build that our engine uses, and our kernels then
use no instruction that this build does not.
"""

from __future__ import annotations

from pathlib import Path

from kvstore_engine.bench.ggml_build import cpu_features, kernel_environment
from kvstore_engine.ggml import find_library
from kvstore_engine.models import locate

MODEL = "smollm2-135m-instruct"
THREADS = 2


def quantisations(quick: bool) -> tuple[str, ...]:
    return ("q4_0",) if quick else ("q4_0", "q8_0")


def model_path(quantisation: str) -> Path:
    return locate(f"{MODEL}:{quantisation}")


def comparable() -> dict[str, str]:
    """Environment of our side."""
    return kernel_environment(cpu_features(find_library()))
