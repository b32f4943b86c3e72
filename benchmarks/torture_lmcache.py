"""The same corruption and the same kills for kvstored and for LMCache's server with its filesystem backends.

    python benchmarks/torture_lmcache.py                      # some minutes
    python benchmarks/torture_lmcache.py --quick --json
    python benchmarks/torture_lmcache.py --only kvstored,fs_native --rounds 10 --kills 20

Both get the same number of requests of four blocks of 128 KiB, the same number of damaged blocks of the same kinds, and
the same number of kills -9 in the middle of storing. LMCache is installed into an environment of its own on first use
(benchmarks/rivals/README.md). The last line of standard output is the result: with --json one object, else a table.
Exit status: 0 done; 2 a side could not be set up or failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rivals.contender import ContenderError
from rivals.environments import LMCACHE, CannotSetUp
from support.report import progress
from torture_runs.harnesses import temporary_root
from torture_runs.mortal_daemon import DaemonFailed
from torture_runs.slot_damage import SLOT_DAMAGES, SlotBytes
from torture_runs.two_stores import BLOCK_BYTES, BLOCKS, Extent, Kvstored, LMCacheServer, Store

from kvstore_console.table import render_table

MIB = 1 << 20
REQUEST_BYTES = BLOCKS * BLOCK_BYTES
ROOMY_BYTES, TIGHT_BYTES = 256 * MIB, 32 * MIB
FILL = 0.7  # of the tight capacity, before the kill and again after it
KINDS = ("flip_payload", "torn", "torn_backwards", "zeroed_sectors", "scribbled", "misdirected", "cut")
MOST_STORED_A_LIFE = 12
SIDES: dict[str, Callable[[Path, int], Store]] = {
    "kvstored": Kvstored,
    "fs": lambda directory, capacity_bytes: LMCacheServer(directory, capacity_bytes, "fs"),
    "fs_native": lambda directory, capacity_bytes: LMCacheServer(directory, capacity_bytes, "fs_native"),
}
ROWS = (
    ("corruptions", "blocks damaged on disk"),
    ("served_wrong", "  blocks served with other bytes"),
    ("refused", "  the others: refused, or whole all the same"),
    ("kills", "kills -9 while storing"),
    ("promised_blocks", "  blocks answered as promised"),
    ("promised_lost", "  of those gone after the restart"),
    ("wrong_after_kill", "  blocks served with other bytes"),
    ("capacity_bytes", "capacity, filled to 70 % before and after a kill"),
    ("disk_bytes", "  bytes on disk then"),
    ("over_capacity_bytes", "  bytes over the capacity"),
)


@dataclass(frozen=True)
class Plan:
    """The same for every side."""

    seed: int
    requests: int
    rounds: int
    damages: int
    kills: int


def main() -> int:
    options = _parse()
    plan = Plan(options.seed, options.requests, options.rounds, options.damages, options.kills)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    results: dict[str, Any] = {}
    try:
        if set(options.only) - {"kvstored"}:
            LMCACHE.ensure()
        with temporary_root(None) as root:
            for name in options.only:
                results[name] = torture_one(name, root, plan)
    except (CannotSetUp, ContenderError, DaemonFailed) as error:
        progress(str(error))
        return 2
    except KeyboardInterrupt:
        progress("interrupted")
        return 130
    print(json.dumps({"seed": plan.seed, "sides": results}) if options.json else table(results))
    return 0


def torture_one(name: str, root: Path, plan: Plan) -> dict[str, Any]:
    """All three trials of one side, each in directories of its own."""
    figures: dict[str, Any] = {}
    for trial, capacity_bytes in ((corrupt, ROOMY_BYTES), (kill, ROOMY_BYTES), (overfill, TIGHT_BYTES)):
        directory = root / f"{name}-{trial.__name__}"
        side = SIDES[name](directory, capacity_bytes)
        try:
            side.start()
            found = trial(side, plan)
            figures |= found
        finally:
            side.close()
            shutil.rmtree(directory, ignore_errors=True)
        figures["promise"] = side.promised
        progress(f"{side.name}, {trial.__name__}: {found}")
    return figures


def corrupt(side: Store, plan: Plan) -> dict[str, Any]:
    """Damage blocks on disk, empty DRAM, read everything; then put the bytes back, and again."""
    rng = np.random.default_rng(plan.seed)
    kinds = Counter[str]()
    served_wrong = 0
    for _ in range(plan.rounds):
        for number in range(1, plan.requests + 1):
            side.store(number)
        side.settle()
        side.forget_dram()
        extents = side.extents()
        chosen = [extents[position] for position in rng.permutation(len(extents))[: plan.damages].tolist()]
        saved = {extent.path: extent.path.read_bytes() for extent in chosen if extent.is_whole_file}
        for extent in chosen:
            kind = str(rng.choice(KINDS))
            kinds[kind] += int(_damage(rng, kind, extent, extents[int(rng.integers(len(extents)))]))
        served_wrong += sum(side.read(number).wrong for number in range(1, plan.requests + 1))
        for path, raw in saved.items():  # our own are stored again: what was damaged is gone
            path.write_bytes(raw)
    return {
        "corruptions": sum(kinds.values()),
        "corruptions_by_kind": dict(kinds),
        "served_wrong": served_wrong,
        "refused": sum(kinds.values()) - served_wrong,
    }


def _damage(rng: np.random.Generator, kind: str, extent: Extent, other: Extent) -> bool:
    """Whether the block's bytes are others now. A cut file ends early; a cut slot holds zeros from there on."""
    image, elsewhere = _image(extent), _image(other)
    if kind == "cut":
        kept = int(rng.integers(1, BLOCK_BYTES))
        if extent.is_whole_file:
            os.truncate(extent.path, kept)
            return True
        damaged = image.copy()
        damaged[extent.payload_at - extent.offset + kept :] = 0
    else:
        zeros = np.zeros(image.nbytes, np.uint8)
        damaged = SLOT_DAMAGES[kind](rng, SlotBytes(image, image.nbytes, zeros, elsewhere))
    with extent.path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), damaged.tobytes(), extent.offset)
    return not np.array_equal(image, damaged)


def _image(extent: Extent) -> np.ndarray[Any, np.dtype[np.uint8]]:
    with extent.path.open("rb", buffering=0) as file:
        nbytes = extent.payload_at - extent.offset + BLOCK_BYTES
        raw = os.pread(file.fileno(), nbytes, extent.offset)
    return np.frombuffer(raw.ljust(nbytes, b"\0"), dtype=np.uint8)


def kill(side: Store, plan: Plan) -> dict[str, Any]:
    """Store until killed; start; everything that an answer vouched for is read."""
    rng = np.random.default_rng(plan.seed)
    promised: dict[int, int] = {}
    total = Counter[str]()
    for life in range(plan.kills):
        timer = threading.Timer(float(rng.uniform(0.1, 1.5)), side.kill9)
        timer.start()
        for number in range(1000 * (life + 1), 1000 * (life + 1) + MOST_STORED_A_LIFE):
            promised[number] = side.store(number)
            if not promised[number]:
                break
        timer.join()
        side.start()
        total["kills"] += 1
        for number, blocks in list(promised.items()):
            if number // 1000 != life + 1 and blocks:
                continue  # read after its own life
            read = side.read(number)
            total["promised_blocks"] += blocks
            total["promised_lost"] += max(0, blocks - read.served)
            total["wrong_after_kill"] += read.wrong
    names = ("kills", "promised_blocks", "promised_lost", "wrong_after_kill")
    return {name: total[name] for name in names}


def overfill(side: Store, plan: Plan) -> dict[str, Any]:
    """Fill to 70 % of the capacity, kill, start, store as much again that is new: who remembers what is on disk?"""
    requests = int(FILL * TIGHT_BYTES / REQUEST_BYTES)
    for number in range(1, requests + 1):
        side.store(number)
    side.settle()
    side.kill9()
    side.start()
    for number in range(requests + 1, 2 * requests + 1):
        side.store(number)
    side.settle()
    disk_bytes = side.disk_bytes()
    over_bytes = max(0, disk_bytes - TIGHT_BYTES)
    has_capacity = side.name != "LMCache fs"
    return {
        "capacity_bytes": TIGHT_BYTES if has_capacity else None,
        "disk_bytes": disk_bytes,
        "over_capacity_bytes": over_bytes if has_capacity else None,
    }


def table(results: dict[str, Any]) -> str:
    """One column a side; a dash where a side has nothing of the kind."""
    promises = ["its answer says", *(figures["promise"] for figures in results.values())]
    rows = [[about, *(_cell(figures.get(name)) for figures in results.values())] for name, about in ROWS]
    return render_table(["", *(f">{side}" for side in results)], [promises, *rows])


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:,}"


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=24, help="stored for the corruption, of 4 blocks (default 24)")
    parser.add_argument("--rounds", type=int, default=4, help="of damage to all of them (default 4)")
    parser.add_argument("--damages", type=int, default=40, help="blocks damaged a round (default 40)")
    parser.add_argument("--kills", type=int, default=10, help="(default 10)")
    parser.add_argument("--only", type=_sides, default=list(SIDES), metavar="SIDES", help=f"of {', '.join(SIDES)}")
    parser.add_argument("--quick", action="store_true", help="one round of damage and three kills")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.kills = 1, 3
    return options


def _sides(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := sorted(set(names) - set(SIDES)):
        raise argparse.ArgumentTypeError(f"no such side: {', '.join(unknown)}; known: {', '.join(SIDES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
