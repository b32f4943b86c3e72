"""What is possible at all, measured beside what is: copies without a store, an empty message without a daemon.

Owns the two contenders that do nothing else, under names that no rival has. A ratio of three is out of reach where the
rival itself makes a copy at more than a third of memcpy's speed; these figures, of the same turns, show where that is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.timing import median

from rivals.contender import WORKERS, Contender, contender
from rivals.turns import Action, Samples

COPIES, MEMCPY, ECHO = "the copies alone", "memcpy", "an empty echo of the stream"
LIMITS = (COPIES, MEMCPY, ECHO)


class Copies:
    """The copies of batches of `values` values of `value_bytes`, as actions to take turns with."""

    def __init__(self, worker: Contender) -> None:
        self._worker = worker

    def prepare(self, values: int, value_bytes: int) -> None:
        self._worker.ask("prepare", values=values, value_bytes=value_bytes)

    def beside(self, operation: str, value_bytes: int) -> dict[str, Action]:
        """`operation`: put (two copies at a time) or get (one); and the yardstick."""
        return {
            COPIES: partial(self._timed, operation, value_bytes),
            MEMCPY: partial(self._timed, "memcpy", value_bytes),
        }

    def _timed(self, operation: str, value_bytes: int, number: int) -> list[float]:
        return [self._worker.ask(operation, number=number, value_bytes=value_bytes)]


@contextmanager
def copies() -> Iterator[Copies]:
    with contender(COPIES, [sys.executable, WORKERS / "copies_client.py"]) as worker:
        yield Copies(worker)


@contextmanager
def echoes() -> Iterator[Contender]:
    with contender(ECHO, [sys.executable, WORKERS / "echo_client.py"]) as worker:
        yield worker


def of_copies(samples: Samples, gb: float) -> dict[str, Any]:
    """The limits of a row on `gb` copied; empty where they were not measured."""
    if COPIES not in samples or MEMCPY not in samples:
        return {}
    return {"possible": gb / median(samples[COPIES]), "possible_name": COPIES, "memcpy": gb / median(samples[MEMCPY])}
