"""The priors that ship with the policy: counts of hazard tables learnt on recorded traces, and their card.

A JSON file, read once; a table's counts are one text, since a JSON list of each cost every start 10 ms. Each table
starts from such counts and goes on learning. Its weight depends on how well it predicts new events, so a prior of
another workload loses its weight within some hundred returns.
`benchmarks/fit_chain_hazard.py` makes the file.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvstore_predictor.ages import BINS, EDGES_S, Floats

FORMAT = 2
FILE = "chain_hazard.json"
_COUNT = "<u4"


class Prior(NamedTuple):
    """Counts for a hazard table that were learned on a recorded `workload`, so that a new predictor does not start
    empty. They have exposed chains and returns by age bin, for each sequence of values of the features in `order`.
    """

    workload: str
    order: tuple[str, ...]
    counts: dict[tuple[int, ...], Floats]


class _Table(NamedTuple):
    """A prior in few bytes: `seen` has the counts of the `paths`, compressed, as base64."""

    workload: str
    order: tuple[str, ...]
    paths: tuple[tuple[int, ...], ...]
    seen: str

    def unpacked(self) -> Prior:
        seen = np.frombuffer(zlib.decompress(base64.b64decode(self.seen)), _COUNT).reshape(-1, 2, BINS)
        counts = zip(self.paths, seen.astype("f4"), strict=True)
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
    model = json.loads(text)
    if model.get("format") != FORMAT or not np.allclose(model["edges_s"], EDGES_S, atol=0.01):
        raise ValueError("the model of chain-hazard was made for another version: refit it")
    return tuple(
        _Table(table["workload"], tuple(table["order"]), tuple(map(tuple, table["paths"])), table["seen"])
        for table in model["tables"]
    )


def write(card: dict[str, Any], priors: list[Prior], *, least: float) -> str:
    """Return the text of a model file with the description `card` and `priors`. Paths with fewer than `least` uses are
    left out.
    """
    tables = []
    for prior in priors:
        counts = {path: seen for path, seen in sorted(prior.counts.items()) if seen[0].max() >= least}
        seen = np.rint(np.array([*counts.values()], np.float64)).astype(_COUNT)
        packed = base64.b64encode(zlib.compress(seen.tobytes(), 9)).decode()
        tables.append({"workload": prior.workload, "order": list(prior.order), "paths": [*counts], "seen": packed})
    edges = [round(float(edge), 3) for edge in EDGES_S]
    lines = ",\n".join(json.dumps(table, separators=(",", ":")) for table in tables)
    head = json.dumps({"format": FORMAT, "card": card, "edges_s": edges}, indent=1)
    return f'{head[:-2]},\n "tables": [\n{lines}\n]}}\n'
