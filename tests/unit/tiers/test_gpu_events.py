"""Events of a worker's streams, taken and given back. The driver is played by the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvstore_cuda.device import CudaDevice
from kvstore_cuda.driver import DriverError
from kvstore_tiers.gpu.streams import Events

PATIENCE_S = 30.0


class PlayedDriver(CudaDevice):
    """All work has ended at once. `made`: how many events there are."""

    def __init__(self) -> None:
        self.made = 0
        self.refuses = False
        self.failing: set[str] = set()
        self.synchronized = 0

    def event(self) -> int:
        self.made += 1
        return self.made

    def record(self, event: int, stream: Any) -> None:
        if self.refuses:
            raise DriverError("cuEventRecord", 801, "NOT_SUPPORTED")

    def stream(self) -> str:
        return "stream"

    def synchronize(self, stream: Any) -> None:
        self._may_fail("cuStreamSynchronize")
        self.synchronized += 1

    def wait(self, event: int) -> None:
        self._may_fail("cuEventSynchronize")

    def _may_fail(self, name: str) -> None:
        if name in self.failing:
            raise DriverError(name, 801, "NOT_SUPPORTED")

    def use_in_this_thread(self) -> None: ...


@contextmanager
def events_of(driver: PlayedDriver) -> Iterator[Events]:
    events = Events(driver)
    yield events
    events.close()


def queue(events: Events) -> DriverError | None:
    """Return a queue of work that has ended: what went wrong."""
    found: list[DriverError | None] = []
    settled = threading.Event()

    def end(failure: DriverError | None) -> None:
        found.append(failure)
        settled.set()

    events.queue("stream", lambda: None, end)
    assert settled.wait(PATIENCE_S), "never settled"
    return found[0]


def test_an_event_that_could_not_be_recorded_is_used_again() -> None:
    driver = PlayedDriver()
    with events_of(driver) as events:
        driver.refuses = True
        for _ in range(5):
            assert isinstance(queue(events), DriverError)
        driver.refuses = False
        for _ in range(5):
            assert queue(events) is None
        assert driver.made == 1


def test_work_whose_event_cannot_be_waited_for_is_settled_when_its_stream_has_run() -> None:
    """Copies may be under way until then, and what they write is used anew once they are settled."""
    driver = PlayedDriver()
    with events_of(driver) as events:
        driver.failing = {"cuEventSynchronize"}
        failure = queue(events)
        assert failure is not None and not failure.is_final and driver.synchronized == 1
        driver.failing = {"cuEventSynchronize", "cuStreamSynchronize"}
        failure = queue(events)
        assert failure is not None and failure.is_final, "only the end of the process is the end of its copies"
        driver.failing = set()
        assert queue(events) is None
