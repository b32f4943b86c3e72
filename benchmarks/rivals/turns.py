"""Taking turns: A B A B, so that what the machine does meanwhile happens to both.

Owns the order of the work and the samples. Never starts or knows a contender: what it is given are
functions that return seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from support.timing import median

Samples = dict[str, list[float]]
Action = Callable[[int], Sequence[float]]
"""Does the work of one round, given its number, and returns the seconds of each piece."""


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
