"""One observer that tells several.

Owns the order in which they are told. Never swallows what one of them raises: an observer must not raise.
"""

from __future__ import annotations

from typing import Literal

from kvstore_engine.batching.events import Reason, Usage
from kvstore_engine.batching.observer import Observer, StepRecord
from kvstore_engine.restore.report import RestoreReport


class FanOut(Observer):
    """Tells each of `observers`, in this order."""

    def __init__(self, *observers: Observer) -> None:
        self._observers = observers

    def replace(self, old: Observer, new: Observer) -> None:
        """From the next event on `new` gets what `old` got."""
        self._observers = tuple(new if observer is old else observer for observer in self._observers)

    def queued(self, request_id: str, t: float) -> None:
        for observer in self._observers:
            observer.queued(request_id, t)

    def admitted(self, request_id: str, index: int, t: float) -> None:
        for observer in self._observers:
            observer.admitted(request_id, index, t)

    def restored(self, request_id: str, index: int, source: Literal["local", "daemon"], tokens: int, t: float) -> None:
        for observer in self._observers:
            observer.restored(request_id, index, source, tokens, t)

    def store_answered(self, request_id: str, index: int, report: RestoreReport, t: float) -> None:
        for observer in self._observers:
            observer.store_answered(request_id, index, report, t)

    def step(self, record: StepRecord) -> None:
        for observer in self._observers:
            observer.step(record)

    def preempted(self, request_id: str, index: int, how: Literal["swap", "recompute"], t: float) -> None:
        for observer in self._observers:
            observer.preempted(request_id, index, how, t)

    def swapped_out(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        for observer in self._observers:
            observer.swapped_out(request_id, index, nbytes, runs, begin_s, end_s)

    def swapped_in(self, request_id: str, index: int, nbytes: int, runs: int, begin_s: float, end_s: float) -> None:
        for observer in self._observers:
            observer.swapped_in(request_id, index, nbytes, runs, begin_s, end_s)

    def stored(self, request_id: str, index: int, tokens: int, reason: str, begin_s: float, end_s: float) -> None:
        for observer in self._observers:
            observer.stored(request_id, index, tokens, reason, begin_s, end_s)

    def token(self, request_id: str, index: int, t: float) -> None:
        for observer in self._observers:
            observer.token(request_id, index, t)

    def finished(self, request_id: str, index: int, reason: Reason, usage: Usage, t: float) -> None:
        for observer in self._observers:
            observer.finished(request_id, index, reason, usage, t)
