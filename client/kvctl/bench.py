"""kvctl ping and bench: the speed of this daemon on this machine, measured through the client as an engine sees it.

Bench stores blocks under token ids of its own, in DRAM only, and deletes them before it ends, also after a failure. In
one run it also measures an empty echo and memcpy of equally many bytes: the ratios can be compared between machines,
the times cannot. It refuses to run if other blocks would be evicted from DRAM for it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvctl.connection import AdminSocket, not_there, open_session
from kvctl.output import DENIED, FAILED, UNREACHABLE, CommandError, Output
from kvstore_client.memory import Bytes
from kvstore_client.session import Session
from kvstore_console.progress import Progress
from kvstore_console.table import render_table
from kvstore_console.units import human_blocks, human_bytes, human_count, human_seconds
from kvstore_proto.arena import slot_bytes
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.v1 import admin_pb2 as wire

BENCH: Final = Fingerprint(
    "kvctl bench", "kvctl bench", layout="opaque", block_tokens=16, engine_block_tokens=16, groups=(LayerGroup(0),)
)
STAGING_BYTES: Final = 64 << 20
SMALL_ROUNDS: Final = 10  # times as many of what takes microseconds
UNCHECKED_BYTES: Final = 1 << 30  # stored without --force when the room in DRAM is not known
PUT_DEADLINE_S: Final = 60.0
_HEADINGS: Final = ("FIGURE", ">ROUNDS", ">P50", ">P99", ">RATE", "TIME AGAINST")
_PROBE = Fingerprint(model_name="kvctl ping", weights_digest="kvctl ping")  # stores nothing


@dataclass(slots=True)
class Figure:
    """The measured times of one kind of request in a benchmark. `against` is the name of another figure to compare them
    with.
    """

    name: str
    nbytes: int = 0
    against: str = ""
    times_s: list[float] = field(default_factory=list)

    def quantile_s(self, share: float) -> float:
        ordered = sorted(self.times_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def bench(directory: Path, arguments: argparse.Namespace, *, clock: Callable[[], float] = time.perf_counter) -> Output:
    warnings = check_room(directory, arguments)
    with (
        Progress("kvctl bench") as progress,
        open_session(directory, BENCH, arguments.timeout, staging_bytes=STAGING_BYTES) as session,
    ):
        try:
            run = _BenchmarkRun(session, arguments, clock, progress)
        except MemoryError:
            raise CommandError(
                FAILED, "bench: not enough memory for its own buffers; use fewer or smaller blocks"
            ) from None
        try:
            figures = run.measure()
        finally:
            left = run.clean_up()
    if left:
        warnings.append(f"{left} blocks of this bench could not be deleted; they are evicted when room is needed")
    reply = {
        "blocks": arguments.blocks,
        "block_bytes": arguments.block_size,
        "figures": [_plain(figure, figures) for figure in figures.values()],
        "warnings": warnings,
    }
    text = _render(arguments, figures)
    return Output("\n".join([text, *(f"warning: {warning}" for warning in warnings)]), reply)


class _BenchmarkRun:
    """One run of bench: its blocks, its buffers, and the blocks it has stored so far."""

    def __init__(
        self, session: Session, arguments: argparse.Namespace, clock: Callable[[], float], progress: Progress
    ) -> None:
        self._session = session
        self._blocks: int = arguments.blocks
        self._block_bytes: int = arguments.block_size
        self._rounds: int = arguments.rounds
        self._timeout_s: float = arguments.timeout
        self._clock = clock
        self._progress = progress
        self._stored: list[npt.NDArray[np.int32]] = []
        total = self._blocks * self._block_bytes
        self._source: Bytes = np.arange(total, dtype=np.uint32).view(np.uint8)[:total]
        self._copy: Bytes = np.ones(total, np.uint8)  # written once, so that no page is new when it is timed
        self._payloads = [self._part(self._source, block) for block in range(self._blocks)]

    def measure(self) -> dict[str, Figure]:
        total = self._blocks * self._block_bytes
        figures = {
            figure.name: figure
            for figure in (
                Figure("echo"),
                Figure("lookup", against="echo"),
                Figure("probe", against="echo"),
                Figure("get", against="echo"),
                Figure("memcpy", total),
                Figure("put", total, against="memcpy"),
                Figure("copied out", total, against="memcpy"),
            )
        }
        self._echo(figures["echo"])
        self._put(figures["put"], figures["memcpy"])
        tokens = self._stored[-1]
        self._look_up(figures["lookup"], tokens)
        if not self._probe(figures["probe"], tokens):
            del figures["probe"]
        self._get(figures["get"], figures["copied out"], figures["memcpy"], tokens)
        return figures

    def clean_up(self) -> int:
        """Delete all blocks that are still stored, and return how many could not be deleted."""
        left = 0
        for tokens in self._stored:
            deleted = self._session.delete(tokens, deadline_s=self._timeout_s)
            left += self._blocks - deleted.blocks - deleted.missing
        self._stored.clear()
        return left

    def _echo(self, figure: Figure) -> None:
        for number in range(self._rounds * SMALL_ROUNDS):
            trip_s = self._session.ping(self._timeout_s)
            if trip_s is None:
                raise not_there("bench", "deadline", self._timeout_s)
            figure.times_s.append(trip_s)
            self._progress.say(f"echo {number}")

    def _put(self, figure: Figure, memcpy: Figure) -> None:
        for number in range(self._rounds):
            tokens = np.random.default_rng().integers(0, 1 << 31, self._blocks * BENCH.block_tokens, dtype=np.int32)
            self._stored.append(tokens)
            started = self._clock()
            receipt = self._session.put(
                tokens,
                payloads=self._payloads,
                payload_bytes=self._block_bytes,
                durability="none",
                deadline_s=max(PUT_DEADLINE_S, self._timeout_s),
            )
            figure.times_s.append(self._clock() - started)
            if receipt.stored_blocks != self._blocks:
                why = receipt.reason or "no room could be made"
                raise CommandError(
                    FAILED, f"bench: {receipt.stored_blocks} of {self._blocks} blocks were stored: {why}; use fewer"
                )
            if number < self._rounds - 1:
                self.clean_up()
            self._memcpy(memcpy)
            self._progress.say(f"put {number + 1} of {self._rounds}")

    def _look_up(self, figure: Figure, tokens: npt.NDArray[np.int32]) -> None:
        for _ in range(self._rounds * SMALL_ROUNDS):
            started = self._clock()
            found = self._session.lookup(tokens)
            figure.times_s.append(self._clock() - started)
            self._need(found.blocks, found.reason)

    def _probe(self, figure: Figure, tokens: npt.NDArray[np.int32]) -> bool:
        """Measure one probe of the lookup index; return False if there is no index, or it does not know the blocks."""
        for _ in range(self._rounds * SMALL_ROUNDS):
            started = self._clock()
            found = self._session.probe(tokens)
            figure.times_s.append(self._clock() - started)
            if found.blocks != self._blocks:
                return False
        return True

    def _get(self, by_lease: Figure, copied: Figure, memcpy: Figure, tokens: npt.NDArray[np.int32]) -> None:
        parts = [self._part(self._copy, block) for block in range(self._blocks)]
        for number in range(self._rounds):
            started = self._clock()
            with self._session.get(tokens) as lease:
                by_lease.times_s.append(self._clock() - started)
                self._need(len(lease), lease.reason)
                if lease.copy_into(parts) != self._blocks:
                    raise CommandError(FAILED, "bench: a lease ended while it was read; use fewer or smaller blocks")
            copied.times_s.append(self._clock() - started)
            if number == 0 and not np.array_equal(self._copy, self._source):
                raise CommandError(FAILED, "bench: the bytes that came back differ from the bytes that were put")
            self._memcpy(memcpy)
            self._progress.say(f"get {number + 1} of {self._rounds}")

    def _memcpy(self, figure: Figure) -> None:
        started = self._clock()
        np.copyto(self._copy, self._source)
        figure.times_s.append(self._clock() - started)

    def _need(self, blocks: int, reason: str) -> None:
        if blocks != self._blocks:
            raise not_there(f"bench: {blocks} of {self._blocks} blocks are still there", reason, self._timeout_s)

    def _part(self, buffer: Bytes, block: int) -> Bytes:
        return buffer[block * self._block_bytes : (block + 1) * self._block_bytes]


def check_room(directory: Path, arguments: argparse.Namespace) -> list[str]:
    """Check that the blocks of the benchmark fit into DRAM beside the stored blocks, and return warnings. `directory`
    has the daemon's sockets. Raises CommandError if the blocks do not fit, unless the user forced the run.
    """
    need_bytes = arguments.blocks * slot_bytes(arguments.block_size)
    try:
        with AdminSocket(directory, arguments.timeout) as admin:
            tiers = {tier.name: tier for tier in admin.call("Tiers", wire.TiersRequest(), wire.TiersReply).tiers}
    except CommandError as error:
        if error.exit_code != DENIED:
            raise
        if need_bytes > UNCHECKED_BYTES and not arguments.force:
            raise CommandError(
                DENIED,
                f"bench would store {human_bytes(need_bytes)} and may not ask how much DRAM is free (that takes an "
                "operator); use fewer blocks, or --force",
            ) from None
        return ["the room in DRAM is not known: only an operator may ask"]
    host = tiers["host"]
    free_bytes = host.capacity_bytes - host.used_bytes + host.used_by["free"]
    if need_bytes <= free_bytes:
        return []
    text = f"{human_bytes(free_bytes)} of DRAM are free and bench stores {human_bytes(need_bytes)}"
    if not arguments.force:
        raise CommandError(
            FAILED, f"{text}: other blocks would be evicted; use fewer --blocks, a smaller --block-size, or --force"
        )
    return [f"{text}: other blocks were evicted, and the figures of put include that"]


def _plain(figure: Figure, figures: dict[str, Figure]) -> dict[str, Any]:
    p50_s = figure.quantile_s(0.5)
    return {
        "name": figure.name,
        "rounds": len(figure.times_s),
        "p50_s": p50_s,
        "p99_s": figure.quantile_s(0.99),
        "bytes": figure.nbytes,
        "bytes_per_s": figure.nbytes / p50_s if figure.nbytes else 0.0,
        "against": figure.against,
        "ratio": p50_s / figures[figure.against].quantile_s(0.5) if figure.against else 0.0,
    }


def _render(arguments: argparse.Namespace, figures: dict[str, Figure]) -> str:
    rows = []
    for figure in figures.values():
        row = _plain(figure, figures)
        rate = f"{human_bytes(row['bytes_per_s'])}/s" if figure.nbytes else "-"
        against = f"{row['ratio']:.2f} x {figure.against}" if figure.against else "-"
        p50, p99 = human_seconds(row["p50_s"]), human_seconds(row["p99_s"])
        rows.append([figure.name, human_count(row["rounds"]), p50, p99, rate, against])
    size = human_bytes(arguments.blocks * arguments.block_size)
    head = f"{human_blocks(arguments.blocks)} of {human_bytes(arguments.block_size)}, {size} in all, from and to DRAM"
    return f"{head}\n{render_table(_HEADINGS, rows)}"


def ping(directory: Path, arguments: argparse.Namespace) -> Output:
    """Measure the time of empty messages to the daemon whose sockets are in `directory`, over a session that only
    reads. Raises CommandError.
    """
    with open_session(directory, _PROBE, arguments.timeout) as session:
        trips = [session.ping(arguments.timeout) for _ in range(arguments.count)]
    times = sorted(trip for trip in trips if trip is not None)
    lost = len(trips) - len(times)
    if not times:
        raise CommandError(UNREACHABLE, f"the daemon at {directory} took the handshake but answers no ping")
    reply = {
        "pings": len(trips),
        "lost": lost,
        "min_s": times[0],
        "median_s": statistics.median(times),
        "max_s": times[-1],
    }
    text = (
        f"{len(times)} of {len(trips)} answered: min {human_seconds(times[0])}, "
        f"median {human_seconds(statistics.median(times))}, max {human_seconds(times[-1])}"
    )
    return Output(text, reply, FAILED if lost else 0)
