"""A study as files: JSON with everything, CSV with one line a case, HTML to look at.

Owns their names and columns. Never measures anything.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from kvstore_engine.bench.report import report_page
from kvstore_engine.bench.study import Case
from kvstore_engine.errors import OperationError

_LATENCIES = ("ttft_s", "tpot_s", "inter_token_s", "total_s", "queued_s")
_PARTS = ("mean", "p50", "p90", "p99", "max")
COLUMNS = (
    "load", "concurrency", "rate", "block_tokens", "seconds", "requests", "failed", "generated_tokens",
    "prompt_tokens", "computed_tokens", "ideal_prompt_tokens", "evaluated_ratio", "generated_per_s", "total_per_s",
    "requests_per_s", *(f"{name}_{part}" for name in _LATENCIES for part in _PARTS), "kv_mean_used", "kv_peak_used",
    "local_tokens", "daemon_tokens",
)  # fmt: skip


def as_json(about: Mapping[str, object], cases: Sequence[Case]) -> dict[str, object]:
    """Everything, as one object."""
    return {**about, "cases": [case.as_json() for case in cases]}


def as_csv(cases: Sequence[Case]) -> str:
    """One line a case, with the columns `COLUMNS`; empty where a figure is not known."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for case in cases:
        fields = _flat(case)
        writer.writerow(["" if fields.get(name) is None else fields[name] for name in COLUMNS])
    return text.getvalue()


def write_files(folder: Path, about: Mapping[str, object], cases: Sequence[Case]) -> list[Path]:
    """bench.json, bench.csv and bench.html in `folder`. OperationError if that cannot be."""
    texts = {
        "bench.json": json.dumps(as_json(about, cases), indent=1) + "\n",
        "bench.csv": as_csv(cases),
        "bench.html": report_page(about, cases),
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise OperationError(f"cannot write to {folder}: {error.strerror}") from None
    return [folder / name for name in texts]


def _flat(case: Case) -> dict[str, object]:
    fields = case.as_json()
    for name in _LATENCIES:
        latency = fields[name]
        assert isinstance(latency, dict)
        fields |= {f"{name}_{part}": latency[part] for part in _PARTS}
    kv, sources = case.profile.get("kv"), case.profile.get("prompt_tokens_by_source")
    if isinstance(kv, dict) and isinstance(sources, dict):
        fields |= {"kv_mean_used": kv["mean_used"], "kv_peak_used": kv["peak_used"]}
        fields |= {"local_tokens": sources["local"], "daemon_tokens": sources["daemon"]}
    return fields
