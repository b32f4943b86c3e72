"""The devices, links and contexts of an 8B model for which restoration is computed in virtual time.

Owns figures, none of them measured: peak bf16 rates at half utilisation and links at their nominal speed; a model of 32
layers, hidden size 4096, 128 KiB of K/V a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvstore_restore.costs import ComputeCost, Contention, LinkCost, RestoreCosts
from kvstore_restore.plan import Prefix

TIER, CHUNK_TOKENS = "host", 512
LAYERS, HIDDEN, TOKEN_BYTES, PARAMETERS = 32, 4096, 128 << 10, 8.0e9
_DEVICES = {"A100": 312e12 * 0.5, "H100": 989e12 * 0.5}
_GIGABITS, _KILOTOKENS = (10, 40, 80), (6, 16, 32, 64, 128)


@dataclass(frozen=True)
class Cell:
    """A device with a link and a context; what restoring costs there."""

    name: str
    kilotokens: int
    prefix: Prefix
    costs: RestoreCosts


def cells() -> Iterator[Cell]:
    for device, operations_s in _DEVICES.items():
        for gigabits in _GIGABITS:
            for kilotokens in _KILOTOKENS:
                name = f"8B_{device}_{gigabits}Gbps_{kilotokens}K"
                yield Cell(name, kilotokens, *_cell(operations_s, gigabits, kilotokens))


def _cell(operations_s: float, gigabits: float, kilotokens: int) -> tuple[Prefix, RestoreCosts]:
    compute = ComputeCost(0.002, 2 * PARAMETERS / operations_s, 4 * LAYERS * HIDDEN / operations_s)
    link = LinkCost(0.001, 8 / (gigabits * 1e9))
    prefix = Prefix((TIER,) * (kilotokens * 1024 // CHUNK_TOKENS), CHUNK_TOKENS, CHUNK_TOKENS * TOKEN_BYTES, LAYERS)
    return prefix, RestoreCosts(compute, {TIER: link}, Contention(1.05, 1.05))
