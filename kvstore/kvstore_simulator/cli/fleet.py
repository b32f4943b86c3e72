"""`kvstored simulate --nodes N`: a trace served by several nodes that share a remote store."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import some_of
from kvstore_simulator.cli import reading
from kvstored.cli.exits import mistake
from kvstored.cli.results import hand_over

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


def simulate(arguments: argparse.Namespace, study_of: Callable[[argparse.Namespace, Any], TimingStudy]) -> int:
    """`study_of` reads what mode timing has too."""
    from kvstore_console.progress import Progress

    try:
        with Progress("kvstored simulate") as progress:
            study = _study(arguments, study_of, partial(progress.advance, "reading"))
            gc.freeze()  # the trace stays: no collection need walk it
            rows = list(study.rows(progress.advance))
    except ValueError as error:
        return mistake(str(error))
    except OSError as error:
        return mistake(f"cannot read {error.filename or arguments.trace}: {error.strerror or error}")
    reading.warn_of_cut(study.trace)
    return hand_over(lambda: _print(arguments, study, rows), None, lambda: "")


def _study(arguments: argparse.Namespace, study_of: Any, progress: Any) -> FleetStudy:
    """Raises ValueError (TraceError) with one line; OSError."""
    from kvstore_simulator.fleet import ROUTINGS, FleetStudy
    from kvstore_simulator.simulated_remote import parse_remote

    for option in _NO_MEANING:
        if getattr(arguments, option) is not None:
            raise ValueError(f"--{option} has no meaning with --nodes; leave it out")
    if arguments.nodes is None:
        raise ValueError("--remote and --routing are for several nodes: add --nodes 8")
    if not 2 <= arguments.nodes <= _NODES_MAX:
        raise ValueError(f"--nodes {arguments.nodes}: 2 to {_NODES_MAX}")
    routings = some_of("--routing", arguments.routing or "all", ROUTINGS, every=ROUTINGS)
    remote = None if arguments.remote is None else parse_remote(arguments.remote)
    timing = study_of(arguments, progress)
    if any(name == "remote" for name, _ in timing.tiers):
        raise ValueError("--tiers remote is a node's own; what nodes share is --remote latency=2ms,bandwidth=1GB/s")
    settings = timing.settings(timing.policies[0], timing.admissions[0])
    return FleetStudy(
        timing.trace, settings, arguments.nodes, routings, remote, timing.count_from, arguments.seed
    )  # fmt: skip


def _print(arguments: argparse.Namespace, study: FleetStudy, rows: list[dict[str, Any]]) -> None:
    from kvstore_console.units import human_bytes
    from kvstore_simulator.report import as_csv, fleet_table

    trace, settings = study.trace, study.settings
    if arguments.json:
        document = {
            "mode": "fleet", "trace": trace.name, "format": trace.format, "seed": study.seed, "part": arguments.part,
            "block_tokens": trace.block_tokens, "model": settings.model.name, "profile": settings.machine.name,
            "speed": settings.speed, "tiers": dict(settings.tiers), "engine_bytes": settings.pool_bytes, "rows": rows,
        }  # fmt: skip
        print(json.dumps(document))
    elif arguments.csv:
        print(as_csv(rows), end="")
    else:
        tiers = ", ".join(f"{name} {human_bytes(nbytes)}" for name, nbytes in settings.tiers)
        print(
            f"{trace.name}: {trace.lookups:,} requests, {trace.distinct_blocks:,} distinct blocks of "
            f"{trace.block_tokens} tokens; {settings.model.name} on {study.nodes} x {settings.machine.name}, "
            f"{human_bytes(settings.pool_bytes)} for each engine's own blocks; each store: {tiers}\n\n"
            f"{fleet_table(rows)}"
        )
        if study.too_long:
            print(
                f"\n{study.too_long:,} requests are longer than an engine's memory and left out of all rows; "
                "--tiers engine=SIZE gives it more"
            )
    sys.stdout.flush()
