"""Copies on a stream of this process: batches of merged runs, where the driver has batches.

Owns the stream until its user destroys it. Never decides what is copied, or when it must have ended.
The device's context has to be current (`DeviceMemory.current`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kvstore_client.device.memory import DeviceMemory

BATCH_VERSION = 13000  # of the driver: cuMemcpyBatchAsync in the form that the library calls
_NON_BLOCKING = 1


class Copy(NamedTuple):
    """Bytes to copy, by addresses; `kind` is HtoD, DtoH or DtoD."""

    to: int
    source: int
    nbytes: int
    kind: str


class CopyStream:
    """Raises DeviceError."""

    def __init__(self, device: DeviceMemory) -> None:
        self._device = device
        self._has_batches = device.call("cuDriverGetVersion") >= BATCH_VERSION
        self.handle: Any = device.call("cuStreamCreate", _NON_BLOCKING)

    def queue(self, copies: Sequence[Copy]) -> None:
        """Queue copies, in no order among them, neighbours as one."""
        runs = merged(copies)
        cuda, call = self._device.driver, self._device.call
        if self._has_batches and len(runs) > 1:
            attributes = cuda.CUmemcpyAttributes()
            attributes.srcAccessOrder = cuda.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            call(
                "cuMemcpyBatchAsync",
                [cuda.CUdeviceptr(run.to) for run in runs],
                [cuda.CUdeviceptr(run.source) for run in runs],
                [run.nbytes for run in runs],
                len(runs), [attributes], [0], 1, self.handle,
            )  # fmt: skip
            return
        for run in runs:
            to = run.to if run.kind == "DtoH" else cuda.CUdeviceptr(run.to)
            source = run.source if run.kind == "HtoD" else cuda.CUdeviceptr(run.source)
            call(f"cuMemcpy{run.kind}Async", to, source, run.nbytes, self.handle)

    def wait(self, event: int) -> None:
        """What is queued from now on runs after this event (a CUevent's address) has passed."""
        self._device.call("cuStreamWaitEvent", self.handle, self._device.driver.CUevent(event), 0)

    def synchronize(self) -> None:
        """Wait until all that is queued has ended."""
        self._device.call("cuStreamSynchronize", self.handle)


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Those that go on where the one before ends, on both sides, are one: the driver takes each for itself."""
    runs: list[Copy] = []
    for copy in copies:
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.kind == copy.kind
            and (copy.to, copy.source) == (last.to + last.nbytes, last.source + last.nbytes)
        ):
            runs[-1] = last._replace(nbytes=last.nbytes + copy.nbytes)
        else:
            runs.append(copy)
    return runs
