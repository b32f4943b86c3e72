"""Small traces in files, of sessions that go on."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_sessions(path: Path, requests: int, *, seed: int = 1) -> Path:
    """Write sessions in the format of Mooncake: chats of a minute's pauses and agents of five seconds', which are
    longer.
    """
    chance, ids, lines = random.Random(seed), iter(range(1 << 30)), []
    sessions: list[tuple[float, list[int], bool]] = []
    now_s = 0.0
    while len(lines) < requests:
        now_s += chance.expovariate(0.8)
        sessions.append((now_s, [], chance.random() < 0.4))
        for due_s, chain, is_agent in [each for each in sessions if each[0] <= now_s]:
            sessions.remove((due_s, chain, is_agent))
            longer = chain + [next(ids) for _ in range(chance.randint(3, 6) if is_agent else 1)]
            lines.append((due_s, longer))
            if chance.random() < (0.9 if is_agent else 0.5):
                pause_s = chance.uniform(4.0, 6.0) if is_agent else chance.uniform(40.0, 80.0)
                sessions.append((due_s + pause_s, longer, is_agent))
    rows = [
        {
            "timestamp": round(at_s * 1000), "input_length": 512 * len(chain), "output_length": 100, "hash_ids": chain,
        }
        for at_s, chain in sorted(lines)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
