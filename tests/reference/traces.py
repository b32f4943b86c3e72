"""Small traces for tests of the simulator, and plain models of what a policy should hit on them.

The models know nothing of residency or policies: dictionaries and definitions, as slow as they like.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from kvstore_simulator.trace import Trace, TraceBuilder

Requests = list[list[int]]


def sessions(seed: int, requests: int, *, prompts: int = 3, live: int = 8) -> Requests:
    """Sessions over shared system prompts that grow by a few blocks a turn; block numbers name prefixes."""
    chance = random.Random(seed)
    fresh = iter(range(10**6))
    shared = [[next(fresh) for _ in range(chance.randrange(1, 6))] for _ in range(prompts)]
    running: Requests = []
    made: Requests = []
    for _ in range(requests):
        if not running or chance.random() < 0.3:
            running.append(list(chance.choice(shared)))
        session = chance.choice(running[-live:])
        session += [next(fresh) for _ in range(chance.randrange(4))]
        made.append(list(session))
    return made


def trace_of(requests: Requests, *, tenants: int = 1, every_s: float = 1.0) -> Trace:
    """One request every `every_s`; sessions fall to tenants by their first block."""
    builder = TraceBuilder("made", "made", 512)
    for at, blocks in enumerate(requests):
        tenant = blocks[0] % tenants
        builder.add(
            round(at * every_s * 1e9), blocks, tenant=tenant, kind=("short", "long")[len(blocks) > 8], space=tenant
        )
    return builder.build()


def write_mooncake(path: Path, requests: Requests, *, every_ms: int = 1000) -> None:
    with gzip.open(path, "wt") as out:
        for at, blocks in enumerate(requests):
            row = {
                "timestamp": at * every_ms,
                "input_length": len(blocks) * 512 - 7,
                "output_length": 9,
                "hash_ids": blocks,
            }
            out.write(json.dumps(row) + "\n")


def write_claude_code(path: Path, sessions_count: int, seed: int = 1, *, tokens: int = 0) -> None:
    """Sessions of 64-token ids that grow, by `tokens` more at the start; each session has ids of its own."""
    chance = random.Random(seed)
    with gzip.open(path, "wt") as out:
        for number in range(sessions_count):
            length, at_s, reqs = chance.randrange(10, 40) + tokens // 64, 0.0, []
            for _ in range(chance.randrange(1, 8)):
                reqs.append([at_s, length * 64, 50, chance.choice("ns"), 1.0, [1, length]])
                at_s += chance.randrange(1, 60)
                length += chance.randrange(0, 20)
            out.write(json.dumps({"id": str(number), "models": [], "tool": 0, "sys": 0, "reqs": reqs}) + "\n")


def parents_of(requests: Requests) -> dict[int, int]:
    return {block: (request[at - 1] if at else -1) for request in requests for at, block in enumerate(request)}


def leaves(held: Sequence[int] | dict[int, int], parents: dict[int, int]) -> list[int]:
    above = {parents[block] for block in held}
    return [block for block in held if block not in above]


def run_of(request: Sequence[int], held: dict[int, int]) -> int:
    return next((at for at, block in enumerate(request) if block not in held), len(request))


def plain_hits(policy: str, requests: Requests, capacity: int) -> list[int]:
    """Hits of each request under `lru`, `fifo` or `clairvoyant` (Belady with bypass), leaf by leaf, by definition."""
    parents = parents_of(requests)
    held: dict[int, int] = {}  # block -> rank; the leaf of the smallest leaves
    found: list[int] = []
    ticks = 0
    for now, request in enumerate(requests):
        found.append(run_of(request, held))
        for block in reversed(request):
            ticks += 1
            if policy == "lru" or block not in held:
                held[block] = ticks
        if policy == "clairvoyant":
            for block in request:
                later = (at for at in range(now + 1, len(requests)) if block in requests[at])
                held[block] = -next(later, len(requests))
        while len(held) > capacity:
            del held[min(leaves(held, parents), key=lambda block: (held[block], -_depth(block, parents)))]
    return found


def _depth(block: int, parents: dict[int, int]) -> int:
    depth = 0
    while (block := parents[block]) >= 0:
        depth += 1
    return depth
