"""Made-up traces for who has no real ones: a chat and coding agents, of the shapes that published traces have.

Chat: two requests in three begin a session; one with a short answer is likelier to go on; gaps of about a minute.
Agents: sessions go on nearly always, after ten seconds (a tool) or some minutes (a person); now and then the history
is edited. They show that the study runs and what its tables look like, not what a policy is worth.
"""

from __future__ import annotations

import gzip
import json
import random
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

_TICK_MS = 3000
_SYSTEM_PROMPTS = 3


def write_standins(directory: Path, *, requests: int, sessions: int) -> list[Path]:
    """A chat of so many requests (Mooncake's format), agents of so many sessions (Claude Code's)."""
    chat, agents = directory / "made-up-chat.jsonl.gz", directory / "made-up-agents.jsonl.gz"
    _write(chat, _chat(random.Random(1), requests))
    _write(agents, [_agent(random.Random(number), number) for number in range(sessions)])
    return [chat, agents]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def _chat(chance: random.Random, requests: int) -> list[dict[str, Any]]:
    due: list[tuple[float, int, list[int]]] = []  # when a session goes on, and the blocks it has by then
    fresh, at_ms, rows = _SYSTEM_PROMPTS + 1, 0.0, []
    for number in range(requests):
        at_ms += chance.expovariate(1 / 300)
        if due and due[0][0] <= at_ms:
            blocks, more = heappop(due)[2], round(chance.expovariate(1 / 3))
        else:
            blocks, more = [1 + chance.randrange(_SYSTEM_PROMPTS)], round(chance.lognormvariate(2.3, 1.1))
        blocks = [*blocks, *range(fresh, fresh + more + 1)]
        fresh += more + 1
        answer = round(chance.lognormvariate(5.0, 1.0)) + 1
        rows.append({
            "timestamp": round(at_ms) // _TICK_MS * _TICK_MS, "input_length": len(blocks) * 512 - 100,
            "output_length": answer, "hash_ids": blocks,
        })  # fmt: skip
        if chance.random() < (0.55 if answer < 150 else 0.25):
            heappush(due, (at_ms + 1000 * chance.lognormvariate(4.0, 0.8), number, blocks))
    return rows


def _agent(chance: random.Random, number: int) -> dict[str, Any]:
    at_s, length, fresh = 0.0, 8 * chance.randrange(20, 100), 100_000
    runs, requests = [1, length], []
    while True:
        total = sum(runs[1::2])
        requests.append([at_s, total * 64, chance.randrange(50, 800), "n", 5.0, list(runs)])
        if chance.random() < 0.05:
            return {"id": f"made-up-{number}", "models": [], "tool": 0, "sys": 0, "reqs": requests}
        at_s += chance.expovariate(1 / 10) if chance.random() < 0.8 else chance.lognormvariate(5.0, 1.0)
        if chance.random() < 0.03:  # the history is edited: what follows is new
            runs = [1, max(8, runs[1] // 2)]
        more = chance.randrange(4, 60)
        runs += [fresh, more]
        fresh += more
