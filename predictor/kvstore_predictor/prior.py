"""The priors that ship with the policy: counts of hazard tables learnt on recorded traces, and their card.

A JSON file, read once. Each table starts from such counts and goes on learning. Its weight depends on how well it
predicts new events, so a prior of another workload loses its weight within some hundred returns.
`benchmarks/fit_chain_hazard.py` makes the file.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore_predictor.ages import BINS, EDGES_S, Floats

FORMAT = 1
FILE = "chain_hazard.json"


class Prior(NamedTuple):
    """Counts for a hazard table that were learned on a recorded `workload`, so that a new predictor does not start
    empty. They have exposed chains and returns by age bin, for each sequence of values of the features in `order`.
    """

    workload: str
    order: tuple[str, ...]
    counts: dict[tuple[int, ...], Floats]


@cache
def shipped() -> tuple[Prior, ...]:
    """Return the priors (counts to start from) that are installed with the package. If the model file is missing,
    return none; every table then starts empty.
    """
    try:
        text = Path(__file__).with_name(FILE).read_text()
    except FileNotFoundError:
        return ()
    return read(text)


def read(text: str) -> tuple[Prior, ...]:
    """Return the priors in `text`, the JSON of a model file. Raises ValueError for a model that was made for other age
    bins.
    """
    model = json.loads(text, object_hook=_packed)  # each table at its end: no lists of all numbers
    if model.get("format") != FORMAT or not np.allclose(model["edges_s"], EDGES_S, atol=0.01):
        raise ValueError("the model of chain-hazard was made for another version: refit it")
    return tuple(model["tables"])


def _packed(part: dict[str, Any]) -> dict[str, Any] | Prior:
    """Return the prior in `part` of a model, or what else is there as it is."""
    if "counts" not in part:
        return part
    seen = np.zeros((len(part["counts"]), 2, BINS), np.float32)  # kept: less than an array a path
    for at, (_, exposed, events) in enumerate(part["counts"]):
        seen[at, 0, : len(exposed)], seen[at, 1, : len(events)] = exposed, events
    paths = (tuple(path) for path, _, _ in part["counts"])
    return Prior(part["workload"], tuple(part["order"]), dict(zip(paths, seen, strict=True)))


def write(card: dict[str, Any], priors: list[Prior], *, least: float) -> str:
    """Return the text of a model file with the description `card` and `priors`. Paths with fewer than `least` uses are
    left out.
    """
    tables = []
    for prior in priors:
        counts = [
            [list(path), _trimmed(seen[0]), _trimmed(seen[1])]
            for path, seen in sorted(prior.counts.items())
            if seen[0].max() >= least
        ]
        tables.append({"workload": prior.workload, "order": list(prior.order), "counts": counts})
    edges = [round(float(edge), 3) for edge in EDGES_S]
    lines = ",\n".join(json.dumps(table, separators=(",", ":")) for table in tables)
    head = json.dumps({"format": FORMAT, "card": card, "edges_s": edges}, indent=1)
    return f'{head[:-2]},\n "tables": [\n{lines}\n]}}\n'


def _trimmed(counts: Floats) -> list[int]:
    whole = [round(float(count)) for count in counts]
    while whole and not whole[-1]:
        whole.pop()
    return whole
