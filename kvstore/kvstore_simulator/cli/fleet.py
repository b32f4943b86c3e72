"""`kvstored simulate --nodes N`: a trace served by several nodes that share a remote store."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import some_of
from kvstore_simulator.cli.results import Advance, Results, keep

if TYPE_CHECKING:
    from kvstore_simulator.fleet import FleetStudy
    from kvstore_simulator.timing import TimingStudy

OPTIONS = ("nodes", "remote", "routing")
_NODES_MAX = 64
_NO_MEANING = ("without", "predictor", "plot")


def add_options(simulate: argparse.ArgumentParser) -> None:
    fleet = simulate.add_argument_group("mode timing, several nodes")
    fleet.add_argument(
        "--nodes", type=int, metavar="N",
        help="so many nodes, each as --profile and --tiers say, against one of N times the size",
    )  # fmt: skip
    fleet.add_argument(
        "--remote", metavar="LIST",
        help="the store that they share: latency=2ms,jitter=1ms,bandwidth=1GB/s,loss=0.01,capacity=1TiB,"
        "share=evicted, reused or all (default: none is shared)",
    )  # fmt: skip
    fleet.add_argument(
        "--routing", metavar="LIST",
        help="random, sticky (where the conversation was) or events (where the blocks are, weighed against the queue); "
        "or all (default all)",
    )  # fmt: skip


def find(arguments: argparse.Namespace, timing: Callable[[Any], TimingStudy], advance: Advance) -> Results:
    """Return what a study of several nodes finds; `timing` reads what mode timing has too."""
    from kvstore_console.units import human_bytes
    from kvstore_simulator.report import fleet_table

    study = _study(arguments, timing, partial(advance, "reading"))
    keep()
    rows, trace, settings = list(study.rows(advance)), study.trace, study.settings
    facts = {
        "mode": "fleet", "seed": study.seed, "profile": settings.machine.name, "speed": settings.speed,
        "tiers": dict(settings.tiers), "engine_bytes": settings.pool_bytes,
    }  # fmt: skip
    tiers = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in settings.tiers)
    text = (
        f"{trace.name}: {trace.lookups:,} requests, {trace.distinct_blocks:,} distinct blocks of "
        f"{trace.block_tokens} tokens; {settings.model.name} on {study.nodes} x {settings.machine.name}, "
        f"{human_bytes(settings.pool_bytes)} for each engine's own blocks; each store: {tiers}\n\n{fleet_table(rows)}"
    )
    if study.too_long:
        text += (
            f"\n\n{study.too_long:,} requests are longer than an engine's memory and left out of all rows; "
            "--tiers engine=SIZE gives it more"
        )
    return Results(trace, settings.model.name, facts, rows, text)


def _study(arguments: argparse.Namespace, study_of: Any, progress: Any) -> FleetStudy:
    """Raises ValueError (TraceError) with one line; OSError."""
    from kvstore_simulator.fleet import ROUTINGS, FleetStudy
    from kvstore_simulator.options import parse_remote

    for option in _NO_MEANING:
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} has no meaning with --nodes; leave it out")
    if arguments.nodes is None:
        raise ValueError("--remote and --routing are for several nodes: add --nodes 8")
    if not 2 <= arguments.nodes <= _NODES_MAX:
        raise ValueError(f"--nodes {arguments.nodes}: 2 to {_NODES_MAX}")
    routings = some_of("--routing", arguments.routing or "all", ROUTINGS, every=ROUTINGS)
    remote = None if arguments.remote is None else parse_remote(arguments.remote)
    timing = study_of(progress)
    if any(name == "remote" for name, _ in timing.tiers):
        raise ValueError("--tiers remote is a node's own; what nodes share is --remote latency=2ms,bandwidth=1GB/s")
    settings = timing.settings(timing.policies[0], timing.admissions[0])
    return FleetStudy(
        timing.trace, settings, arguments.nodes, routings, remote, timing.count_from, arguments.seed
    )  # fmt: skip
