"""`kvengine restorations`: shows the plans and results of a running server's last restorations.

The module owns the request and the table. The server keeps the records (`restore.record`).
"""

import argparse
import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore_console.table import render_table
from kvstore_console.units import human_seconds, human_share
from kvstore_engine.errors import OperationError, UsageError

_TIMEOUT_S = 10.0
_HEADINGS = ["request", "plan", ">DRAM", ">loaded", ">computed", ">lost", ">predicted", ">took", ">link", ">compute"]
_LEGEND = "DRAM, loaded, computed, lost: stored blocks; link, compute: share of the time that each worked"
_STAGES_LEGEND = "loaded, computed: blocks of the stage's layers; states: blocks whose hidden states it loaded"


def run(options: argparse.Namespace) -> int:
    """Run `kvengine restorations`: print the plans and results of the last prompts that a running server restored from
    kvstored, and return exit code 0. Raises UsageError for wrong `options`, OperationError if the server does not
    answer.
    """
    if options.last < 1:
        raise UsageError(f"--last must be at least 1, got {options.last}")
    records = _ask(options.url, options.last, _key(options.api_key_file))
    if options.json:
        print(json.dumps(records))
    elif records:
        print(restorations_table(records))
    else:
        print("nothing has been restored yet")
    return 0


def restorations_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return a text table with a line for each of `records`. A record is the dictionary that
    `RestorationRecord.as_json` makes of one restoration.
    """
    has_stages = any(record.get("stage") is not None for record in records)
    headings = [*_HEADINGS, ">states"] if has_stages else _HEADINGS
    rows = [[*_cells(record), str(record["inputs"])] if has_stages else _cells(record) for record in records]
    return "\n".join([render_table(headings, rows), _LEGEND, *([_STAGES_LEGEND] if has_stages else [])])


def _key(path: Path | None) -> str:
    """Return the key in the first line of `path`; "" without a file."""
    try:
        return "" if path is None else path.read_text().partition("\n")[0].strip()
    except OSError as error:
        raise UsageError(f"cannot read the key in {path}: {error.strerror}") from None


def _ask(url: str, last: int, key: str) -> list[dict[str, Any]]:
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{url!r} is not a server's address: http://HOST:PORT")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/restorations?last={last}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            records: list[dict[str, Any]] = json.load(response)["restorations"]
    except urllib.error.HTTPError as error:
        raise OperationError(f"{url} answers {error.code}: {error.read(500).decode(errors='replace')}") from None
    except (OSError, ValueError, KeyError) as error:
        raise OperationError(f"{url} cannot be asked: {error}") from None
    return records


def _cells(record: Mapping[str, Any]) -> list[str]:
    actual_s = record["actual_s"]
    counts = [str(record[name]) for name in ("mapped", "loaded", "computed", "lost")]
    times = [human_seconds(record["predicted_s"]), "" if actual_s is None else human_seconds(actual_s)]
    shares = [human_share(record[f"{name}_busy_s"], actual_s) if actual_s else "" for name in ("load", "compute")]
    name, plan = f"{record['request_id']}/{record['index']}", record["plan"] or "DRAM"
    if record.get("stage") is not None:
        first, end = record["layers"]
        name, plan = f"{name}, stage {record['stage']} (layers {first}-{end - 1})", record["plan"] or "compute"
    return [name, plan, *counts, *times, *shares]
