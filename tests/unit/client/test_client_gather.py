"""The kernel for small runs never reads a sheet that was written anew, and never makes a thread wait for one."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from kvstore_client.device import DeviceError, gather
from kvstore_client.device.gather import MOST_RUNS, SHEETS, GatherKernel
from kvstore_cuda import compiler as cuda_compiler
from kvstore_cuda.copies import CopyRun, Runs
from tests.reference.played_device import PlayedDevice

LINE = gather.ALIGNED_BYTES


class Device(PlayedDevice):
    """Kernels run when `run` is called; an event has passed once those before it have."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[int, int]] = []  # runs, count
        self.due: dict[int, int] = {}  # kernels that an event waits for
        self.ran = self.made = self.waits = 0
        self.fails_to_record = False

    def call(self, name: str, *arguments: Any) -> Any:
        if name == "cuEventCreate":
            self.made += 1
            return self.made
        if name == "cuLaunchKernel":
            parameters = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))
            argument = gather.GatherArgument.from_address(parameters[0] or 0)
            self.launched.append((argument.runs, argument.count))
        elif name == "cuEventRecord":
            if self.fails_to_record:
                raise DeviceError(name, 999, "CUDA_ERROR_UNKNOWN")
            self.due[arguments[0]] = len(self.launched)
        elif name == "cuEventQuery" and self.due.get(arguments[0], 0) > self.ran:
            raise DeviceError(name, 600, "CUDA_ERROR_NOT_READY")
        elif name in ("cuStreamSynchronize", "cuEventSynchronize"):
            self.waits += 1
            self.run()
        return 1

    def run(self, kernels: int | None = None) -> None:
        end = len(self.launched) if kernels is None else self.ran + kernels
        for runs, count in self.launched[self.ran : end]:
            rows = np.frombuffer((ctypes.c_char * (count * gather._RUN.itemsize)).from_address(runs), gather._RUN)
            for row in rows:
                ctypes.memmove(int(row["to"]), int(row["source"]), int(row["nbytes"]))
        self.ran = end


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[Device, GatherKernel]:
    monkeypatch.setattr(cuda_compiler, "compile_program", lambda *_, **__: b"a cubin")
    device = Device()
    anything: Any = device
    return device, GatherKernel(anything)


def lines(count: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], Runs]:
    source = np.random.default_rng(1).integers(0, 256, count * LINE, np.uint8)
    to = np.zeros_like(source)
    offsets = range(0, count * LINE, LINE)
    return source, to, Runs.of(CopyRun(to.ctypes.data + at, source.ctypes.data + at, LINE) for at in offsets)


def test_what_no_sheet_is_free_for_is_returned_and_all_else_is_copied(made: tuple[Device, GatherKernel]) -> None:
    device, kernel = made
    source, to, runs = lines((SHEETS + 3) * MOST_RUNS + 5)
    left = kernel.queue(runs, 7)
    assert list(left.rows()) == list(runs.rows())[SHEETS * MOST_RUNS :] and device.waits == 0
    device.run(2)
    left = kernel.queue(left, 7)
    assert len(left) == MOST_RUNS + 5, "two sheets were free again"
    device.run()
    assert not kernel.queue(left, 7)
    device.run()
    assert np.array_equal(source, to) and to.any() and device.waits == 0


def test_where_no_event_says_when_a_sheet_is_free_the_stream_is_waited_for(made: tuple[Device, GatherKernel]) -> None:
    device, kernel = made
    source, to, runs = lines(3)
    device.fails_to_record = True
    with pytest.raises(DeviceError):
        kernel.queue(runs, 7)
    assert device.waits == 1 and np.array_equal(source, to) and to.any()
