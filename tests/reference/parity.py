"""Compares our logits with llama.cpp's: the yardstick is how far llama.cpp is from itself.

llama.cpp computes attention in two ways, with and without flash attention, that differ by rounding. Ours may
be no further from the nearer of the two than they are from each other. llama.cpp runs in a child process, on
the same shared library as ours: one ggml a process.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore_engine.executor import Executor
from kvstore_engine.executors import StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.graph import SequenceSlice
from kvstore_engine.model.weights import load_model
from kvstore_engine.pool import BlockPool

FloatArray = npt.NDArray[np.float32]
TokenArray = npt.NDArray[np.int32]
_CHILD = Path(__file__).with_name("llama_decode.py")
_SLACK = 1.1  # both differences are themselves rounding, measured on a few thousand logits


@dataclass(frozen=True)
class Comparison:
    """Root mean squares: of llama.cpp's two ways from each other, of ours from the nearer, of the logits."""

    itself: float
    ours: float
    logits: float

    def check(self) -> None:
        """AssertionError if we are further from llama.cpp than it is from itself."""
        assert 0 < self.itself < 0.2 * self.logits, self
        assert self.ours <= _SLACK * self.itself, self


def compare(
    models: Mapping[str, Path], tokens: TokenArray, folder: Path, chunks: Sequence[int]
) -> dict[str, Comparison]:
    """Every model on `tokens`, decoded in `chunks` by both sides; all of llama.cpp's work in one child."""
    np.save(folder / "tokens.npy", tokens)
    jobs = [
        {
            "model": str(path),
            "tokens": str(folder / "tokens.npy"),
            "logits": str(folder / f"{name}-{flash}.npy"),
            "flash": flash,
            "chunks": list(chunks),
        }
        for name, path in models.items()
        for flash in (False, True)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(_CHILD), "--jobs", str(folder / "jobs.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=230)
    assert done.returncode == 0, done.stderr[-2000:]
    context = -(-len(tokens) // 256) * 256  # as the child's: LongRoPE depends on it
    return {name: _compare(name, path, tokens, folder, chunks, context) for name, path in models.items()}


def _compare(
    name: str, path: Path, tokens: TokenArray, folder: Path, chunks: Sequence[int], context: int
) -> Comparison:
    plain, flash = (np.load(folder / f"{name}-{on}.npy") for on in (False, True))
    ours = own_logits(path, tokens, chunks, context)
    return Comparison(rms(plain - flash), min(rms(ours - plain), rms(ours - flash)), float(plain.std()))


def own_logits(path: Path, tokens: TokenArray, chunks: Sequence[int], context: int) -> FloatArray:
    """Our logits of every token, float32 [tokens, vocabulary], computed over shuffled blocks."""
    blocks = -(-len(tokens) // 16)
    with (
        load_model(GGUFFile.open(path), context=context) as model,
        Executor(model, BlockPool(model.config, blocks), StepSizes(threads=1, max_context=context)) as executor,
    ):
        table = np.random.default_rng(7).permutation(blocks).astype(np.int32)
        parts, start = [], 0
        for count in chunks:
            piece = SequenceSlice(tokens[start : start + count], start, table, "all")
            parts.append(executor.forward([piece]))
            start += count
        return np.concatenate(parts)


def rms(difference: FloatArray) -> float:
    """Root mean square."""
    return float(np.sqrt(np.mean(np.square(difference, dtype=np.float64))))
