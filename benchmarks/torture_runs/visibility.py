"""Checks that one client finds at once what another has put: put, then a lookup by another process, with no time in
between.

Owns two client processes that take turns over a pair of pipes: each puts a run of blocks and passes the turn in the
moment its put is answered; the other looks all of them up. A check is one key whose tier the daemon reports in the
answer to a lookup that the client sent after the put was answered. The shared lookup index is probed too, and counted
apart: it is a hint that may say "unknown", but never "absent".
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

import kvstore_client
from kvstore_client import Fingerprint, LayerGroup
from torture_runs.child_process import end_child, start_child
from torture_runs.figures import Assignment, Clock, Figures
from torture_runs.kill_model import payload_of
from torture_runs.mortal_daemon import MortalDaemon

BLOCK_TOKENS = 16
PAYLOAD_BYTES = 1024
MODEL = Fingerprint(
    "torture", "visibility", block_tokens=BLOCK_TOKENS, engine_block_tokens=BLOCK_TOKENS,
    groups=(LayerGroup(0, "full", 0, (0,), PAYLOAD_BYTES // BLOCK_TOKENS),),
)  # fmt: skip
SETTINGS = ("host.capacity=256MiB", "host.staging=64MiB", "host.arena=8MiB", "limits.max_block=1MiB")
BELOW = (  # DRAM, by turns: nothing, so that a million checks take minutes; or NVMe, with write-back under way
    ("nvme.enabled=false",),
    ("nvme.enabled=false",),
    ("nvme.capacity=64MiB", "nvme.slab=8MiB", "nvme.io_threads=2"),
)
ROUND_S = 8.0
SIZES = (1, 2, 3, 16, 64, 200, 500, 500, 500, 500)
MODES = ("none", "batch", "none", "batch", "none", "batch", "none", "none", "none", "always")
COUNTED = (
    "checks", "round_trips", "probes", "probes_unknown", "probes_absent", "bytes_checked_blocks", "throttled",
)  # fmt: skip
BYTES_CHECKED_EVERY = 16  # turns


def torture(assignment: Assignment, figures: Figures) -> None:
    """Figures: `visibility_checks`, `visibility_misses`; of the index, `visibility_probes`."""
    clock = Clock(assignment)
    number = 0
    while clock.goes_on(figures.counts["visibility_checks"]):
        below = BELOW[number % len(BELOW)]
        with MortalDaemon(assignment.directory / f"visibility-{number}", *SETTINGS, *below) as daemon:
            daemon.start()
            _round(daemon, assignment.seed + number, min(ROUND_S, max(clock.left_s, 0.1)), figures)
        shutil.rmtree(daemon.directory, ignore_errors=True)
        number += 1
        figures.heartbeat()


def _round(daemon: MortalDaemon, seed: int, seconds: float, figures: Figures) -> None:
    """Two clients for some seconds; then both are new, with new keys."""
    log = daemon.directory / "players.log"
    to_b, to_a = os.pipe(), os.pipe()
    ends = {"a": (to_a[0], to_b[1]), "b": (to_b[0], to_a[1])}
    players = []
    with log.open("ab") as errors:
        for name, (reading, writing) in ends.items():
            order = {"name": name, "socket_dir": str(daemon.socket_dir), "seed": seed, "seconds": seconds}
            command = [sys.executable, __file__, json.dumps(order | {"reading": reading, "writing": writing})]
            players.append(start_child(command, stdout=-1, stderr=errors, text=True, pass_fds=(reading, writing)))
            for fd in (reading, writing):
                os.close(fd)
    try:
        for player in players:
            assert player.stdout is not None
            line = player.stdout.readline()
            if not line:
                raise RuntimeError(f"a client failed:\n{log.read_text(errors='replace')[-2000:]}")
            report = json.loads(line)
            for what in report.pop("missed"):
                figures.fail("visibility_misses", f"seed {seed}: {what}")
            for what in report.pop("wrong"):
                figures.fail("visibility_wrong", f"seed {seed}: {what}")
            for name, count in report.items():
                figures.add(f"visibility_{name}", count)
    finally:
        for player in players:
            end_child(player)


class Player:
    """One of the two clients."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._name = order["name"]
        self._reading, self._writing = order["reading"], order["writing"]
        self._end = time.monotonic() + order["seconds"]
        self._rng = np.random.default_rng([order["seed"], self._name == "a"])
        self._base = order["seed"] % 997 * 2 + int(self._name == "a")
        self._session = kvstore_client.connect(
            order["socket_dir"], fingerprint=MODEL, required=True, deadline_s=30.0, connect_timeout_s=30.0,
            staging_bytes=4 << 20,
        )  # fmt: skip
        self._turns = 0
        self.report: dict[str, Any] = {"missed": [], "wrong": []}
        self.report |= dict.fromkeys(COUNTED, 0)

    def play(self) -> None:
        """`a` begins; a turn of size 0 ends the game."""
        if self._name == "a":
            self._put()
        while True:
            base, number, blocks = self._receive()
            if blocks:
                self._check(base, number, blocks)
            if not blocks or time.monotonic() > self._end:
                self._send(0, 0)
                return
            self._put()

    def _put(self) -> None:
        """Store a new run and pass the turn the moment it is answered."""
        self._turns += 1
        number, blocks = self._turns, int(self._rng.choice(SIZES))
        if self._rng.random() < 0.2 and number > 1:
            number -= 1  # the last run again, longer or shorter: what is there is found there
        payloads = [payload_of(PAYLOAD_BYTES, self._base, number, block) for block in range(blocks)]
        mode = MODES[int(self._rng.integers(len(MODES)))]
        receipt = self._session.put(tokens(self._base, number, blocks), payloads=payloads, durability=mode)
        self._send(number, _leading(receipt.statuses))
        self.report["throttled"] += blocks - receipt.visible_blocks

    def _check(self, base: int, number: int, blocks: int) -> None:
        prefix = tokens(base, number, blocks)
        if self._turns % 2:
            self._look_up(prefix, number, blocks)
            self._probe(prefix, number, blocks)
        else:
            self._probe(prefix, number, blocks)
            self._look_up(prefix, number, blocks)
        if self._turns % BYTES_CHECKED_EVERY == 0:
            self._read(prefix, base, number)

    def _look_up(self, prefix: np.ndarray[Any, Any], number: int, blocks: int) -> None:
        found = self._session.lookup(prefix)
        absent = [block for block in range(blocks) if block >= len(found.tiers) or found.tiers[block] == "absent"]
        self.report["round_trips"] += 1
        self.report["checks"] += blocks
        if absent or found.blocks != blocks:
            self.report["missed"].append(f"run {number} of {blocks} blocks: {len(absent) or 1} missing, {found.reason}")

    def _probe(self, prefix: np.ndarray[Any, Any], number: int, blocks: int) -> None:
        probed = self._session.probe(prefix)
        self.report["probes"] += blocks
        if probed.reason == "absent":
            self.report["probes_absent"] += blocks - probed.blocks
        elif probed.blocks < blocks:
            self.report["probes_unknown"] += blocks - probed.blocks

    def _read(self, prefix: np.ndarray[Any, Any], base: int, number: int) -> None:
        with self._session.get(prefix) as lease:
            for block in range(len(lease)):
                self.report["bytes_checked_blocks"] += 1
                if not np.array_equal(lease.payload(block), payload_of(PAYLOAD_BYTES, base, number, block)):
                    self.report["wrong"].append(f"run {number} block {block}")

    def _send(self, number: int, blocks: int) -> None:
        turn = b"".join(value.to_bytes(4, "big") for value in (self._base, number, blocks))
        with suppress(BrokenPipeError):  # the other has ended the game
            os.write(self._writing, turn)

    def _receive(self) -> tuple[int, int, int]:
        raw = os.read(self._reading, 12)
        return tuple(int.from_bytes(raw[at : at + 4], "big") for at in (0, 4, 8))  # type: ignore[return-value]


def tokens(base: int, number: int, blocks: int) -> np.ndarray[Any, Any]:
    """A prefix that no other run begins with."""
    prefix = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32)
    prefix[:2] = (base, number)
    return prefix


def _leading(statuses: list[str]) -> int:
    """Return how many leading blocks the put's answer called visible."""
    for position, status in enumerate(statuses):
        if status not in ("stored", "present"):
            return position
    return len(statuses)


if __name__ == "__main__":
    player = Player(json.loads(sys.argv[1]))
    player.play()
    print(json.dumps(player.report), flush=True)
