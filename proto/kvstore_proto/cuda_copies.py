"""Copies as the CUDA driver takes them: neighbours in one, then all in one call where the driver has batches.

Owns nothing. Addresses are those of mapped device memory and of registered host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from kvstore_proto.cuda_driver import call

BATCH_VERSION = 13000  # of the driver: cuMemcpyBatchAsync in the form that the library calls
Way = Literal["to device", "to host", "on device"]


@dataclass(frozen=True, slots=True)
class Run:
    """`nbytes` to copy from the address `source` to the address `to`."""

    to: int
    source: int
    nbytes: int


def merged(runs: Iterable[Run]) -> list[Run]:
    """The same copies with neighbours in one: the driver merges none, and small ones are slow."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.to):
        last = joined[-1] if joined else None
        if last and last.to + last.nbytes == run.to and last.source + last.nbytes == run.source:
            joined[-1] = Run(last.to, last.source, last.nbytes + run.nbytes)
        else:
            joined.append(run)
    return joined


def has_batches(cuda: ModuleType) -> bool:
    """Whether the driver takes many copies in one call."""
    return bool(call(cuda, "cuDriverGetVersion") >= BATCH_VERSION)


def queue_copies(cuda: ModuleType, runs: Sequence[Run], way: Way, stream: Any, *, is_batched: bool) -> None:
    """Queue copies on `stream`, in no order among them. `is_batched`: what `has_batches` says. Raises DriverError."""
    if is_batched and len(runs) > 1:
        attributes = cuda.CUmemcpyAttributes()
        attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        to = [cuda.CUdeviceptr(run.to) for run in runs]
        sources = [cuda.CUdeviceptr(run.source) for run in runs]
        sizes = [run.nbytes for run in runs]
        call(cuda, "cuMemcpyBatchAsync", to, sources, sizes, len(runs), [attributes], [0], 1, stream)
        return
    for run in runs:
        if way == "to device":
            call(cuda, "cuMemcpyHtoDAsync", cuda.CUdeviceptr(run.to), run.source, run.nbytes, stream)
        elif way == "to host":
            call(cuda, "cuMemcpyDtoHAsync", run.to, cuda.CUdeviceptr(run.source), run.nbytes, stream)
        else:
            call(cuda, "cuMemcpyDtoDAsync", cuda.CUdeviceptr(run.to), cuda.CUdeviceptr(run.source), run.nbytes, stream)
