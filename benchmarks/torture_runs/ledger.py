"""The ledger: what all torture runs of one state of the source found, added up.

Owns a file of JSON lines, one a run, under the user's state directory unless another is named, and the question which
state of the source a run belongs to. Lines are only ever appended; a line that is not JSON is passed over.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torture_runs.figures import add_up

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("proto", "tiers", "kvstore", "client")
ABOUT_A_RUN = ("commit", "at", "seed", "seconds_asked", "interrupted", "seconds_by_harness")


def default_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvstored" / "torture.jsonl"


def source_state() -> str:
    """The commit, with a digest of what differs from it in the product's own folders; else the version."""
    try:
        commit = _git("rev-parse", "--short=12", "HEAD").strip()
        changed = _git("diff", "HEAD", "--", *PRODUCT) + _untracked()
    except (OSError, subprocess.CalledProcessError):
        from kvstored import __version__

        return f"version {__version__}"
    return f"{commit}+{hashlib.sha256(changed.encode()).hexdigest()[:8]}" if changed else commit


def _untracked() -> str:
    names = _git("ls-files", "--others", "--exclude-standard", "--", *PRODUCT).split("\n")
    return "".join((ROOT / name).read_text(errors="replace") for name in names if name.endswith(".py"))


def append(path: Path, line: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as ledger:
        ledger.write(json.dumps(line) + "\n")


def sums(path: Path) -> dict[str, dict[str, Any]]:
    """By state of the source, in the order of their first runs: how many runs, and their figures added up."""
    total: dict[str, dict[str, Any]] = {}
    for line in _lines(path):
        of_commit = total.setdefault(str(line.get("commit")), {"runs": 0})
        of_commit["runs"] += 1
        add_up(of_commit, {name: value for name, value in line.items() if name not in ABOUT_A_RUN})
    return total


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(text)
            except ValueError:
                continue


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout
