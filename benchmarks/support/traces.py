"""Made-up traces for benchmarks of the simulator, of the two shapes that real ones have.

`chat`: two requests in three are new and used once, the others continue a recent session. `agents`: long sessions that
return again and again with a little more. Written as Mooncake lines, so that the readers are part of what is measured.
"""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_chat(path: Path, requests: int) -> None:
    _write(path, requests, share_new=0.65, first_blocks=22, more_blocks=6, live=400)


def write_agents(path: Path, requests: int) -> None:
    _write(path, requests, share_new=0.02, first_blocks=120, more_blocks=4, live=40)


def _write(path: Path, requests: int, *, share_new: float, first_blocks: int, more_blocks: int, live: int) -> None:
    chance = random.Random(1)
    fresh = 1
    sessions: list[list[int]] = []
    with path.open("w") as out:
        for at in range(requests):
            if not sessions or chance.random() < share_new:
                session = [0]
                sessions = [*sessions[-live:], session]
                grown = first_blocks
            else:
                session = chance.choice(sessions)
                grown = more_blocks
            more = 1 + round(chance.expovariate(1 / grown))
            session.extend(range(fresh, fresh + more))
            fresh += more
            row = {"timestamp": at * 300, "input_length": len(session) * 512, "output_length": 300, "hash_ids": session}
            out.write(json.dumps(row) + "\n")
