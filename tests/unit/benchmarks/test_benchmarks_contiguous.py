"""benchmarks/support/contiguous.py keeps each sequence in one piece, and no token of an answer is another for it."""

import importlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("xllamacpp", reason="the extra engine is not installed")

from kvstore_engine.batching.events import Token
from kvstore_engine.batching.request import Request, RequestSettings
from kvstore_engine.batching.settings import EngineSettings
from kvstore_engine.bench.in_process import BenchEngine, opened
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from kvstore_engine.pool import BlockPool
from tests.reference.tiny_llama import write_tiny_llama

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
_SEQUENCES, _REQUESTS = 4, 12


def _answers(model: Path) -> tuple[dict[str, list[int]], int]:
    """Return the tokens of each answer over a pool that is too small for all, and the blocks that were moved."""
    random = np.random.Generator(np.random.PCG64(3))
    settings = EngineSettings(max_running=_SEQUENCES, prefix_sharing=False, compaction=False)
    wanted = BenchEngine(model, 128, _SEQUENCES, 1, pool_tokens=256, settings=settings)
    found: dict[str, list[int]] = {}
    with opened(wanted) as engine:
        for number in range(_REQUESTS):
            prompt = random.integers(5, 200, int(random.integers(8, 60))).astype(np.int32)
            answer = RequestSettings(max_tokens=int(random.integers(8, 60)), ignore_end=True)
            engine.add(Request(str(number), prompt, answer))
        while engine.has_work:
            for event in engine.step():
                if isinstance(event, Token):
                    found.setdefault(event.request_id, []).append(event.token)
            for table in getattr(engine.space, "tables", ()):
                assert table.blocks == list(range(table.ids[0], table.ids[0] + table.count)), "one piece"
        return found, getattr(engine.space, "moved", 0)


def test_sequences_lie_in_one_piece_and_answer_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    space = importlib.import_module("support.contiguous").ContiguousSpace
    model = write_tiny_llama(tmp_path / "tiny.gguf", llama__context_length=256)
    paged, _ = _answers(model)
    with patch("kvstore_engine.batching.engine.BlockSpace", space):
        contiguous, moved = _answers(model)
    assert contiguous == paged
    assert len(paged) == _REQUESTS
    assert moved, "the pool was small enough for sequences to meet"


def test_gaps_without_moves_are_shorter_by_the_moves_in_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(_BENCHMARKS))
    contiguous = importlib.import_module("support.contiguous").ContiguousSpace
    with GGUFFile.open(write_tiny_llama(tmp_path / "tiny.gguf")) as file:
        pool = BlockPool(ModelConfig.from_gguf(file), 8)
    ticks = iter([11.0, 11.5, 13.0, 13.25])
    space = contiguous(pool, clock=lambda: next(ticks))
    assert space.gaps_without_moves([10.0, 12.0, 14.0]) == [2.0, 2.0]
    table = space.claim("", np.arange(40, dtype=np.int32))
    space._move(table, 0)  # to another place, and back
    space._move(table, 4)
    assert (space.moved, space.moves) == (2 * table.count, [(11.5, 0.5), (13.25, 0.25)])
    assert space.gaps_without_moves([10.0, 12.0, 12.5, 14.0]) == [1.5, 0.5, 1.25]
