"""The harnesses of a torture run: what each measures, its share of the time, and how one is run to its end.

Owns the list, and the child process of each harness: its figures survive its death, its descendants do not.
Never adds up or judges.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torture_runs.child_process import kill_naming, start_child

PREFIX = "kvtorture-"
OVERTIME_S = 180.0
LOG_TAIL_LINES = 25
Reported = dict[str, Any]


@dataclass(frozen=True)
class Harness:
    """`counts` is what `--stop-at NAME=N` counts. A run without this harness reports its `figure_names` as null."""

    name: str
    module: str
    about: str
    share: float
    counts: str
    figure_names: tuple[str, ...]


HARNESSES = (
    Harness(
        "corruption", "corruption", "damaged slots, records, superblocks and seals of an NVMe tier",
        0.20, "corruptions", ("corruptions", "served_wrong"),
    ),
    Harness(
        "corruption-daemon", "corruption_daemon", "damaged slots under a running daemon, read by its clients",
        0.10, "corruptions", ("corruptions", "served_wrong"),
    ),
    Harness(
        "codecs", "codec_damage", "damaged slots and spoilt frames of every codec, in slower memory and on NVMe",
        0.10, "corruptions", ("corruptions", "served_wrong", "frames_fuzzed"),
    ),
    Harness(
        "kills", "run_harness", "kill -9 at random and at each failpoint, under clients of two tenants",
        0.30, "kills", ("kills", "durable_lost", "resurrected", "wrong_bytes_after_kill", "over_capacity_bytes"),
    ),
    Harness(
        "objects", "object_damage", "objects cut short by kill -9, and damaged parts on NVMe",
        0.10, "kills", ("kills", "corruptions", "durable_lost", "served_wrong", "over_capacity_bytes"),
    ),
    Harness(
        "power-loss", "power_loss", "every write recorded, the log cut and reordered between syncs",
        0.14, "power_loss_states", ("power_loss_states", "power_loss_wrong", "power_loss_lost"),
    ),
    Harness(
        "warm-restart", "warm_restart", "what is left in DRAM after kill -9 and a new start",
        0.04, "warm_restarts", ("dram_blocks_before", "dram_blocks_after_restart"),
    ),
    Harness(
        "visibility", "visibility", "put, then a lookup by another client at once",
        0.12, "visibility_checks", ("visibility_checks", "visibility_misses"),
    ),
    Harness(
        "hostile", "hostile", "a tenant that tries for another's blocks; made-up and spoilt messages on every socket",
        0.10, "hostile_inputs", ("hostile_inputs", "hostile_successes", "hostile_crashes"),
    ),
    Harness(
        "soak", "soak", "clients, tenants, pins, reloads and a full disk come and go, and nothing grows",
        0.10, "soak_rounds", ("soak_rounds", "soak_wrong"),
    ),
)  # fmt: skip


@dataclass
class Ended:
    """The end of a harness. `failure` is empty when it ended by itself with status 0."""

    figures: dict[str, Any]
    seconds: float
    failure: str = ""


def run_to_the_end(
    harness: Harness, seed: int, seconds: float, root: Path, stop_at: int | None, on_the_way: Callable[[Reported], None]
) -> Ended:
    """Run one harness in `root`. KeyboardInterrupt kills it and all it started, and goes on up with the figures.
    `on_the_way` hears of the figures so far, about once a second."""
    started = time.monotonic()
    directory = root / harness.name
    directory.mkdir()
    log = root / f"{harness.name}.log"
    command = [sys.executable, str(Path(__file__).with_name("run_harness.py")), harness.module, str(seed)]
    command += [str(seconds), str(directory), *([str(stop_at)] if stop_at is not None else [])]
    latest: list[Reported] = [{}]
    failure = ""
    with log.open("wb") as errors:
        child = start_child(command, stdout=-1, stderr=errors, text=True, new_session=True)
    try:
        _listen(child, seconds + OVERTIME_S, latest, on_the_way)
        status = child.wait(OVERTIME_S)
        failure = f"ended with status {status}\n{_tail(log)}" if status else ""
    except TimeoutError:
        failure = f"did not end within {seconds + OVERTIME_S:.0f} s\n{_tail(log)}"
    except KeyboardInterrupt as interrupt:
        interrupt.args = (latest[0],)
        raise
    finally:
        end_all(child, directory)
    return Ended(latest[0], time.monotonic() - started, failure)


def _listen(
    child: subprocess.Popen[Any], patience_s: float, latest: list[Reported], on_the_way: Callable[[Reported], None]
) -> None:
    """Read its lines until it ends; `latest[0]` holds the last figures it reported. Raises TimeoutError."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def forward() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put("")

    threading.Thread(target=forward, daemon=True).start()
    deadline = time.monotonic() + patience_s
    while True:
        try:
            line = lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise TimeoutError from None
        if not line:
            return
        with suppress(ValueError):
            latest[0] = json.loads(line)
            on_the_way(latest[0])


def end_all(child: subprocess.Popen[Any], directory: Path) -> None:
    """Kill the harness's session, and each process outside it that names its directory on the command line."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    kill_naming(directory)
    shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def temporary_root(beside: Path | None) -> Iterator[Path]:
    """A folder of this run's own, gone afterwards; folders of runs that were killed themselves go too."""
    parent = beside or Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*-*"):
        owner = left.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(left, ignore_errors=True)
    root = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))
    try:
        yield root
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
