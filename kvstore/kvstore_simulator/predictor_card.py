"""The figures of predictors on recordings as a table, and the card of a learned model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

from kvstore_console.table import render_table
from kvstore_console.units import human_seconds
from kvstore_predictor.return_trees import COLUMNS, ReturnTrees
from kvstore_simulator.judging import Judged
from kvstore_simulator.trace import Trace
from kvstore_simulator.training import CHOSEN, FITTED, Trained
from kvstored import __version__

HEADINGS = (
    "PREDICTOR", ">WITHIN", ">GUESSES", ">CAME TRUE", ">LOG LOSS", ">OF THE MEAN", ">BRIER", ">ECE",
    ">PRECISION AT 0.5", ">RECALL AT 0.5",
)  # fmt: skip
_SHOWN = ("log loss", "of the mean", "brier", "ece")
Row = dict[str, Any]


def rows_of(seen: Mapping[str, Mapping[float, Judged]]) -> list[Row]:
    """Return a row of figures, for machines, for each predictor and horizon (in seconds) in `seen`. Undefined figures
    are None.
    """
    return [
        {"predictor": name, "horizon_s": horizon_s}
        | {
            key.replace(" ", "_"): None if math.isnan(value) else round(value, 6)
            for key, value in judged.figures().items()
        }
        for name, by_horizon in seen.items()
        for horizon_s, judged in by_horizon.items()
    ]


def table(rows: Sequence[Row]) -> str:
    return render_table(HEADINGS, _lines(rows))


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        shown = [f"{row['guesses']:,}", "-", *"-" * len(_SHOWN), "-", "-"]
        if row["guesses"]:
            shares = [row["came_true"], row["precision_0.5"], row["recall_0.5"]]
            came, precise, found = ("-" if share is None else f"{share:.1%}" for share in shares)
            losses = [f"{row[name.replace(' ', '_')]:.4f}" for name in _SHOWN]
            shown = [shown[0], came, *losses, precise, found]
        lines.append([row["predictor"], human_seconds(row["horizon_s"]), *shown])
    return lines


def card(traces: Sequence[Trace], trained: Trained) -> dict[str, Any]:
    """Return a description of the trained model `trained`: the recordings in `traces`, its features, and its figures on
    the parts of the recordings from which it did not learn.
    """
    trees = ReturnTrees(trained.arrays).trees
    return {
        "model": "boosted trees upon session-return's chance of return",
        "trained": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"kvstored": __version__, **{name: version(name) for name in ("numpy", "scikit-learn")}},
        "recordings": [
            {
                "name": trace.name, "format": trace.format, "requests": trace.requests,
                "hours": round((int(trace.times_ns[-1]) - int(trace.times_ns[0])) / 3.6e12, 3),
                "tenants": len(set(trace.tenants.tolist())), "block_tokens": trace.block_tokens,
            }
            for trace in traces
        ],
        "split": f"by time, of each recording: fitted until {FITTED:.0%} of the requests, trees chosen and chances "
        f"straightened until {CHOSEN:.0%}, judged on the rest",
        "rows": {
            "fitted": trained.fitted_rows, "of them requested again": trained.returned_rows,
            "chosen with": trained.chosen_rows,
        },
        "features": list(COLUMNS),
        "trees": trees,
        "calibration": dict(zip(("offset", "factor"), trained.arrays["calibration"].tolist(), strict=True)),
        "held_out": rows_of({"learned": trained.learned, "session-return": trained.plain}),
    }  # fmt: skip
