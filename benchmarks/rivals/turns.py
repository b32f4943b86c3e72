"""Turns of contenders, A B A B, so that the machine's other work happens to both, and the limits measured beside them.

Owns the order of the work, the samples, and the two contenders that only copy, or only echo an empty message, under
names that no rival has. A ratio of three is out of reach where the rival itself makes a copy at more than a third of
memcpy's speed; the limits of each turn show where that is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from support.report import median

from rivals.contender import WORKERS, Contender, contender

Samples = dict[str, list[float]]
Action = Callable[[int], Sequence[float]]
"""Does the work of one round, given its number, and returns the seconds of each piece."""
COPIES, MEMCPY, ECHO = "the copies alone", "memcpy", "an empty echo of the stream"
LIMITS = (COPIES, MEMCPY, ECHO)


def take_turns(actions: Mapping[str, Action], rounds: int, warm_up: int = 1) -> Samples:
    """Each action once a round. The first action rotates, so that no action always follows the same other one."""
    samples: Samples = {name: [] for name in actions}
    names = list(actions)
    for number in range(warm_up + rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            seconds = actions[name](number)
            if number >= warm_up:
                samples[name] += seconds
    return samples


def best_of(samples: Samples, names: Sequence[str]) -> str:
    """The name with the lowest median: a rival is judged in its best setting of this run."""
    return min(names, key=lambda name: median(samples[name]))


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
