"""Made-up workloads of every kind that a tier may meet, each from a seed: what no published trace shows together.

Objects that are used by themselves, loops, scans, documents that are asked about, sessions with short and long pauses,
and shifts from one to another in mid-run. Pure: the same family and seed give the same trace. Never replays.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from heapq import heappop, heappush

from kvstore_simulator.trace import Trace, TraceBuilder

BLOCK_TOKENS = 512
Request = tuple[float, list[int]]  # seconds, blocks
Family = Callable[[random.Random, int, Iterator[int]], list[Request]]  # chance, requests, ids that are free


def trace_of(name: str, seed: int, requests: int) -> Trace:
    """`requests` requests of family `name`."""
    builder = TraceBuilder(f"{name}-{seed}", "made", BLOCK_TOKENS)
    chance = random.Random(f"{name} {seed}")
    for at_s, blocks in FAMILIES[name](chance, requests, itertools.count()):
        builder.add(round(at_s * 1e9), blocks, input_tokens=len(blocks) * BLOCK_TOKENS)
    return builder.build()


def _objects(skew: float, length: int, population: int = 2000) -> Family:
    """Prompts of up to `length` blocks, drawn by Zipf's law; none continues another."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        objects = [[next(ids) for _ in range(chance.randint(1, length))] for _ in range(population)]
        weights = list(itertools.accumulate((rank + 1) ** -skew for rank in range(population)))
        drawn = chance.choices(objects, cum_weights=weights, k=requests)
        return list(zip(_arrivals(chance, 1.0), drawn, strict=False))

    return make


def _loop(prompts: int, length: int, noise: float = 0.0) -> Family:
    """The same prompts one after the other, again and again; `noise` of the requests are used once."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        objects = [[next(ids) for _ in range(length)] for _ in range(prompts)]
        turns = itertools.cycle(objects)
        return [
            (at_s, [next(ids) for _ in range(length)] if chance.random() < noise else next(turns))
            for at_s, _ in zip(_arrivals(chance, 1.0), range(requests), strict=False)
        ]

    return make


def _scan(share: float, skew: float = 1.0) -> Family:
    """Objects by Zipf's law, and between them `share` of prompts that are used once."""
    popular = _objects(skew, 8, 500)

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        return [
            (at_s, [next(ids) for _ in range(chance.randint(4, 24))] if chance.random() < share else blocks)
            for at_s, blocks in popular(chance, requests, ids)
        ]

    return make


def _documents(questions: float, wait_s: float, length: int = 60) -> Family:
    """Documents that are asked about: `questions` each on the mean, each question after about `wait_s`."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        made: list[Request] = []
        for began_s in _arrivals(chance, 4.0):
            if len(made) >= requests:
                break
            text = [next(ids) for _ in range(chance.randint(length // 4, length))]
            at_s = began_s
            while True:
                made.append((at_s, [*text, *(next(ids) for _ in range(chance.randint(1, 2)))]))
                if chance.random() < 1 / questions:
                    break
                at_s += chance.expovariate(1 / wait_s)
        return sorted(made)[:requests]

    return make


def _sessions(pause: Callable[[random.Random], float], goes_on: float = 0.8, system: int = 0) -> Family:
    """Sessions that grow with each turn, after a pause; `system` blocks begin all of them."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        made: list[Request] = []
        due: list[tuple[float, int, list[int]]] = []
        head = [next(ids) for _ in range(system)]
        arrivals, number = _arrivals(chance, 3.0), itertools.count()
        begins_s = next(arrivals)
        while len(made) < requests:
            if due and due[0][0] < begins_s:
                at_s, _, blocks = heappop(due)
            else:
                at_s, blocks, begins_s = begins_s, list(head), next(arrivals)
            blocks = [*blocks, *(next(ids) for _ in range(chance.randint(1, 10)))]
            made.append((at_s, blocks))
            if chance.random() < goes_on:
                heappush(due, (at_s + pause(chance), next(number), blocks))
        return made

    return make


def _after(first: Family, second: Family) -> Family:
    """Return half of the requests of `first`, then the requests of `second`."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        before = first(chance, requests // 2, ids)
        later_s = before[-1][0] + 1.0
        after = second(chance, requests - requests // 2, ids)
        return [*before, *((later_s + at_s - after[0][0], blocks) for at_s, blocks in after)]

    return make


def _beside(first: Family, second: Family) -> Family:
    """Both at once, half of the requests each."""

    def make(chance: random.Random, requests: int, ids: Iterator[int]) -> list[Request]:
        return sorted(first(chance, requests // 2, ids) + second(chance, requests - requests // 2, ids))

    return make


def _arrivals(chance: random.Random, mean_s: float) -> Iterator[float]:
    at_s = 0.0
    while True:
        at_s += chance.expovariate(1 / mean_s)
        yield at_s


def _fixed(pause_s: float) -> Callable[[random.Random], float]:
    return lambda chance: pause_s


def _exponential(mean_s: float) -> Callable[[random.Random], float]:
    return lambda chance: chance.expovariate(1 / mean_s)


def _heavy(shape: float, least_s: float) -> Callable[[random.Random], float]:
    """Pauses with a heavy tail: the longer one has lasted, the longer it goes on."""
    return lambda chance: min(least_s * chance.paretovariate(shape), 20_000.0)


_STEADY = _objects(1.0, 8)
_CHATS = _sessions(_exponential(60.0))
FAMILIES: dict[str, Family] = {
    "objects, flat": _objects(0.6, 1),
    "objects": _objects(0.9, 1),
    "objects, steep": _objects(1.2, 1),
    "prompts, flat": _objects(0.6, 16),
    "prompts": _objects(1.0, 16),
    "loop": _loop(200, 8),
    "loop, long": _loop(40, 60),
    "loop and prompts used once": _loop(100, 8, noise=0.3),
    "scan": _scan(0.5),
    "scan, heavy": _scan(0.9),
    "documents, two questions": _documents(2.0, 60.0),
    "documents, four questions": _documents(4.0, 200.0),
    "documents, long waits": _documents(3.0, 1500.0),
    "sessions, fixed pauses": _sessions(_fixed(60.0)),
    "sessions, long fixed pauses": _sessions(_fixed(600.0)),
    "sessions": _CHATS,
    "sessions, system prompt": _sessions(_exponential(60.0), system=6),
    "sessions, heavy tail": _sessions(_heavy(1.1, 5.0)),
    "sessions, very heavy tail": _sessions(_heavy(0.7, 2.0)),
    "sessions, few turns": _sessions(_exponential(30.0), goes_on=0.3),
    "shift, sessions to objects": _after(_CHATS, _STEADY),
    "shift, objects to sessions": _after(_STEADY, _CHATS),
    "shift, loop to sessions": _after(_loop(100, 8), _CHATS),
    "shift, sessions get slow": _after(_sessions(_fixed(20.0)), _sessions(_fixed(400.0))),
    "shift, objects to other objects": _after(_STEADY, _objects(1.0, 8)),
    "sessions beside objects": _beside(_CHATS, _STEADY),
    "sessions beside documents": _beside(_CHATS, _documents(3.0, 120.0)),
}
