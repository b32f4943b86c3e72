"""A pool on a device that has no more memory or threads: nothing is left behind. What stands for the device counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvstore_client.device import DeviceError, DevicePool, PoolPart
from kvstore_connectors.vllm.tensors import VllmDevicePages
from tests.reference.played_device import PlayedDevice

_ENDS = {"cuStreamDestroy": "cuStreamCreateWithPriority", "cuMemHostUnregister": "cuMemHostRegister"}


class Device(PlayedDevice):
    """`failing`: the call, and which of them, that fails. `held`: what was made and has not been ended."""

    def __init__(self, failing: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        self.held: Counter[str] = Counter()
        self._failing, self._calls = failing, Counter[str]()

    def call(self, name: str, *arguments: Any) -> int:
        self._calls[name] += 1
        if (name, self._calls[name]) == self._failing:
            raise DeviceError(name, 2, "CUDA_ERROR_OUT_OF_MEMORY")
        if name in _ENDS.values():
            self.held[name] += 1
        return int(name != "cuDeviceGetAttribute")  # no host memory at the same addresses: no kernel copies

    def quietly(self, name: str, *arguments: Any) -> None:
        if name in _ENDS:
            self.held[_ENDS[name]] -= 1


def opened(device: Device) -> VllmDevicePages:
    return VllmDevicePages(device, DevicePool([[PoolPart(64, 64, 64)]], 4), lambda: 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("failing", [(name, at) for name in _ENDS.values() for at in (1, 2)])
def test_what_was_made_before_a_failure_is_ended(failing: tuple[str, int]) -> None:
    device = Device(failing)
    with pytest.raises(DeviceError, match="OUT_OF_MEMORY"):
        opened(device)
    assert not device.held.total() and not device.mappings._followers


def test_closing_ends_everything_once() -> None:
    device = Device()
    pages = opened(device)
    assert device.held == {"cuStreamCreateWithPriority": 2, "cuMemHostRegister": 2}
    for _ in range(2):
        pages.close()
    assert not device.held.total() and not device.mappings._followers
