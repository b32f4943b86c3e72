"""Decode steps that are recorded once for each bucket and then replayed: one launch instead of a thousand.

Owns the recordings and when one is made. `CudaRecorder` makes them as CUDA graphs, which has not yet run on hardware.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from kvstore_engine.torch_executor.library import torch_library

Compute = Callable[[int, int], Any]  # rows, longest context: its results
Replay = Callable[[], None]

_MOST_KEPT = 128  # buckets times lengths of a context are about half as many


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
    """Computes decode steps; with a recorder, the second of a kind is recorded, and later ones are replayed.

    At most `_MOST_KEPT` kinds are known; the one that was not seen for longest is forgotten first.
    """

    def __init__(self, compute: Compute, recorder: Recorder | None) -> None:
        self._compute, self._recorder = compute, recorder
        self._known: OrderedDict[Hashable, tuple[Replay, Any] | None] = OrderedDict()  # None: computed once

    def run(self, rows: int, longest_context: int, variant: Hashable = None) -> Any:
        """The results of `rows` rows, for use before the next call. Rows and context are a bucket's; `variant` is what
        else steps of one kind have in common.
        """
        key = rows, longest_context, variant
        if self._recorder is None:
            return self._compute(rows, longest_context)
        if key not in self._known:
            logits = self._compute(rows, longest_context)
            self._known[key] = None
            if len(self._known) > _MOST_KEPT:
                self._known.popitem(last=False)
            return logits
        self._known.move_to_end(key)
        recorded = self._known[key]
        if recorded is None:
            recorded = self._known[key] = self._recorder.record(lambda: self._compute(rows, longest_context))
        replay, logits = recorded
        replay()  # recording computes nothing by itself
        return logits

    def drop(self) -> None:
        """Forget all recordings, which frees their memory."""
        self._known.clear()
