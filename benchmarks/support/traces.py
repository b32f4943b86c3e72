"""Made-up traces for benchmarks: of the simulator, of the two shapes that real ones have; and of engines, token ids.

`chat`: two requests in three are new and used once, the others continue a recent session. `agents`: long sessions that
return again and again with a little more. Written as Mooncake lines, so that the readers are part of what is measured.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Agents:
    """Prompts, each a list of token ids. `before`: what was asked so far. `after`: what comes next, the next turn of
    every agent at work, then agents that begin."""

    before: list[list[int]]
    after: list[list[int]]

    def distinct_blocks(self, tokens: int) -> int:
        """Return how many different blocks of `tokens` tokens are in `before`, each with all that is to its left."""
        return len({tuple(each[:end]) for each in self.before for end in range(tokens, len(each) + 1, tokens)})


def agents_of(agents: int, at_work: int, vocabulary: int) -> Agents:
    """Return the prompts of `agents` agents in one program, `at_work` at a time, token ids below `vocabulary`.

    Half begin with one system prompt of 250 tokens and one of three roles of 60, half with the conversation of another
    agent up to some turn (a sub-agent, or another attempt); then comes a task. A turn adds an answer of 60 tokens and
    what a tool said. At 2,000 tokens an agent is done.
    """
    chance = random.Random(1)

    def drawn(least: int, most: int) -> list[int]:
        return [chance.randrange(2, vocabulary) for _ in range(chance.randint(least, most))]

    system, roles = drawn(250, 250), [drawn(60, 60) for _ in range(3)]
    working: list[list[list[int]]] = []  # of each agent, its prompts
    begun, before = 0, []

    def begin() -> list[int]:
        if working and chance.random() < 0.5:
            taken = chance.choice(chance.choice(working))
            return taken + drawn(100, 300)
        return system + chance.choice(roles) + drawn(100, 300)

    while begun < agents or len(working) < at_work:
        if (len(working) < at_work and chance.random() < 0.4) or not working:
            working.append([begin()])
            begun += 1
            before.append(working[-1][-1])
            continue
        agent = chance.choice(working)
        agent.append(agent[-1] + drawn(60, 60) + drawn(80, 300))
        before.append(agent[-1])
        if len(agent[-1]) > 2000:
            working.remove(agent)
    turns = [agent[-1] + drawn(60, 60) + drawn(80, 300) for agent in working]
    return Agents(before, turns + [begin() for _ in range(at_work // 2)])
