"""Decode steps that are recorded once for each bucket and then replayed: one launch instead of a thousand.

Owns the recordings and when one is made. `CudaRecorder` makes them as CUDA graphs, which has not yet run on hardware.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from kvstore_engine.torch_executor.library import torch_library

Compute = Callable[[int, int], Any]  # rows, longest context: logits
Replay = Callable[[], None]


class Recorder(ABC):
    """Makes a recording. The caller has computed the step once, so that everything is loaded."""

    @abstractmethod
    def record(self, compute: Callable[[], Any]) -> tuple[Replay, Any]:
        """What computes the same again from the memory of its inputs, and its result, overwritten by each replay."""


class CudaRecorder(Recorder):
    """CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._torch = torch_library()
        self._pool = self._torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], Any]) -> tuple[Replay, Any]:
        graph = self._torch.cuda.CUDAGraph()
        # The storing thread copies meanwhile, on its own stream: only this thread's calls belong to the graph.
        with self._torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return graph.replay, result


class DecodeSteps:
    """Computes decode steps; with a recorder, the second of a bucket is recorded, and later ones are replayed."""

    def __init__(self, compute: Compute, recorder: Recorder | None) -> None:
        self._compute, self._recorder = compute, recorder
        self._seen: set[tuple[int, int]] = set()
        self._recorded: dict[tuple[int, int], tuple[Replay, Any]] = {}

    def run(self, rows: int, longest_context: int) -> Any:
        """Logits [rows, vocabulary], for use before the next call. Both arguments are a bucket's."""
        key = rows, longest_context
        if self._recorder is None or key not in self._seen:
            self._seen.add(key)
            return self._compute(rows, longest_context)
        if key not in self._recorded:
            self._recorded[key] = self._recorder.record(lambda: self._compute(rows, longest_context))
        replay, logits = self._recorded[key]
        replay()  # recording computes nothing by itself
        return logits

    def drop(self) -> None:
        """Forget all recordings, which frees their memory."""
        self._recorded.clear()
        self._seen.clear()
