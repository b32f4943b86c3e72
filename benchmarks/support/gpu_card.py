"""A device as the questions about kernels want it; a test has a stand-in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import numpy.typing as npt

from kvstore_engine.kernels.cuda import Launcher

Array = npt.NDArray[np.generic]
Transferred = Callable[[], float]


class Card(ABC):
    """A device to ask. Memory that it hands out lives as long as it does."""

    launcher: Launcher
    stream = 0

    @abstractmethod
    def place(self, array: Array) -> int:
        """Its address on the device, after a copy."""

    @abstractmethod
    def place_on_host(self, array: Array) -> int:
        """The address of a copy in host memory that the device reads and writes at the same address."""

    @abstractmethod
    def repeated(self, array: Array, nbytes: int) -> int:
        """The address of `nbytes` that hold `array` again and again."""

    @abstractmethod
    def read(self, address: int, like: Array) -> Array:
        """What is there now, in the shape and type of `like`, once everything queued has run."""

    @abstractmethod
    def seconds(self, queue: Callable[[], object], *, in_graph: bool = True) -> float:
        """How long what `queue` queues takes, when it is repeated without a gap: captured once, or, where that is not
        wanted, queued faster than it runs."""

    @abstractmethod
    def steps(self, queue: Callable[[], object], launches: int, count: int) -> list[float]:
        """How long each of `count` steps takes, from its start on the host until its end is seen there: a step is what
        `queue` queues, `launches` times."""

    @abstractmethod
    def batch_s(self, runs: Sequence[tuple[int, int, int]], *, to_device: bool) -> float:
        """How long a batch of copies (to, from, bytes) takes, from before it is queued."""

    @abstractmethod
    def copied_bytes_s(self) -> float:
        """Bytes that a large copy within the device reads and writes in a second."""

    @abstractmethod
    def saturated(self, *, by_process: bool) -> AbstractContextManager[Transferred]:
        """While it lasts, copies from the host keep the bus busy, from a thread of this process or from a process of
        its own. What it gives says how many bytes a second they reached so far."""

    @abstractmethod
    def stored(self) -> AbstractContextManager[Transferred]:
        """The same of copies to the host, from a thread that keeps to a client's budget (`LinkBudget`) beside an engine
        that decodes."""
