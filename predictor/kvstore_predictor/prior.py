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
import numpy.typing as npt

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


class _Table(NamedTuple):
    """A prior in few bytes: `seen` has the counts of the paths, in the smallest integers that hold them."""

    workload: str
    order: tuple[str, ...]
    paths: tuple[tuple[int, ...], ...]
    seen: npt.NDArray[np.unsignedinteger]

    def unpacked(self) -> Prior:
        counts = zip(self.paths, self.seen.astype(np.float32), strict=True)
        return Prior(self.workload, self.order, dict(counts))


def shipped() -> tuple[Prior, ...]:
    """Return the priors (counts to start from) that are installed with the package. If the model file is missing,
    return none; every table then starts empty.
    """
    return tuple(table.unpacked() for table in _shipped())


@cache
def _shipped() -> tuple[_Table, ...]:
    """Return the tables of the installed model file, which each tier's policy asks for, as does a new one later."""
    try:
        text = Path(__file__).with_name(FILE).read_text()
    except FileNotFoundError:
        return ()
    return _tables(text)


def read(text: str) -> tuple[Prior, ...]:
    """Return the priors in `text`, the JSON of a model file. Raises ValueError for a model that was made for other age
    bins.
    """
    return tuple(table.unpacked() for table in _tables(text))


def _tables(text: str) -> tuple[_Table, ...]:
    model = json.loads(text, object_hook=_packed)  # each table at its end: no lists of all numbers
    if model.get("format") != FORMAT or not np.allclose(model["edges_s"], EDGES_S, atol=0.01):
        raise ValueError("the model of chain-hazard was made for another version: refit it")
    return tuple(model["tables"])


def _packed(part: dict[str, Any]) -> dict[str, Any] | _Table:
    """Return the table in `part` of a model, or what else is there as it is."""
    if "counts" not in part:
        return part
    most = max((max(counts, default=0) for _, *both in part["counts"] for counts in both), default=0)
    seen = np.zeros((len(part["counts"]), 2, BINS), np.min_scalar_type(most))
    for at, (_, exposed, events) in enumerate(part["counts"]):
        seen[at, 0, : len(exposed)], seen[at, 1, : len(events)] = exposed, events
    paths = tuple(tuple(path) for path, _, _ in part["counts"])
    return _Table(part["workload"], tuple(part["order"]), paths, seen)


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
