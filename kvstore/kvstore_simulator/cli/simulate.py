"""`kvstored simulate`: the hits of a policy on a recorded trace, beside two upper bounds. With --mode timing (module
`timing`): the latency on one machine or several. With --format pages (module `decode`): the reads of a decode.
"""

from __future__ import annotations

import argparse
import errno
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import Commands, one_of, some_of, words
from kvstore_simulator.cli import decode, reading, timing
from kvstore_simulator.cli.results import Advance, Results, carry_out, keep
from kvstored.exits import failure, mistake

if TYPE_CHECKING:
    from kvstore_simulator.study import Study

_BLOCKS_MAX = 1e12
_CAPACITY, _POLICY = "0.01,0.05,0.1", "lru,best"
_REPLAY_ONLY = ("capacity", "hints", "cost", "reuse_distance")
_PAGES = "pages"
_EXAMPLES = """\
examples:
  kvstored simulate chat.jsonl.gz --format mooncake --capacity 0.01,0.05,0.1 --policy lru,lfu-ttl,best
  kvstored simulate chat.jsonl.gz --format mooncake --part second-half --reuse-distance --json
  kvstored simulate agents.jsonl.gz --format claude-code --window-s 3600 --seed 7 --plot agents.html
  kvstored simulate mine.jsonl.gz --format kvstored --as-recorded --cost prices.toml
  kvstored simulate chat.jsonl.gz --format mooncake --policy best --keep-worth 4 --cost prices.toml
  kvstored simulate chat.jsonl.gz --format mooncake --mode timing --profile h100 --devices 4 --plot timing.html
  kvstored simulate chat.jsonl.gz --format mooncake --mode timing --profile h200 --tiers dram=128GiB,cxl --speed 0.5
  kvstored simulate chat.jsonl.gz --format mooncake --mode timing --tiers gpu=16GiB,dram,nvme --without gpu
  kvstored simulate chat.jsonl.gz --format mooncake --mode timing --without prefetch,overlap,weigh,write-behind
  kvstored simulate chat.jsonl.gz --format mooncake --mode timing --speed 0.3 --predictor session-return,oracle
  kvstored simulate chat.jsonl.gz --format mooncake --nodes 8 --remote latency=2ms,bandwidth=10GB/s --routing all
  kvstored simulate smollm2-135m --format pages --scratch 16MiB --cxl latency=400ns,bandwidth=20GB/s

Every table of a replay begins with two bounds: unbounded (room for everything) and clairvoyant (knows the future).
Every table of mode timing begins with the engine alone and the baseline, an engine with a host cache.
exit status: 0 done; 1 the result could not be written; 2 a mistake in the arguments, the trace, profile or price table
"""


def add_simulate(commands: Commands) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="replay a trace against policies and capacities, or against a machine, with the daemon's own parts",
        description="Replay a recorded trace against policies, admissions and capacities (mode replay), or serve it "
        "on a machine of given compute and tiers (mode timing), in virtual time.",
        epilog=_EXAMPLES,
    )
    simulate.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines, gzip or not; - for standard input")
    simulate.add_argument("--format", required=True, metavar="NAME", help="mooncake, claude-code, kvstored or pages")
    simulate.add_argument(
        "--mode", default="replay", metavar="MODE",
        help="replay: hits at capacities (default); timing: time to first token on a machine",
    )  # fmt: skip
    simulate.add_argument(
        "--capacity", metavar="LIST",
        help=f"at most 1: of the trace's distinct blocks; above: whole blocks (default {_CAPACITY}; mode replay)",
    )  # fmt: skip
    simulate.add_argument("--policy", metavar="LIST", help=f"or all (default {_POLICY}; in mode timing best)")
    simulate.add_argument("--admission", default="always", metavar="LIST", help="or all (default always)")
    simulate.add_argument("--ttl-s", type=float, default=0.0, help="blocks idle for longer expire (default 0: never)")
    simulate.add_argument(
        "--keep-worth", type=float, default=0.0, metavar="USES",
        help="chains expected to bring fewer uses an hour of holding a block expire (default 0: never; best alone)",
    )  # fmt: skip
    simulate.add_argument("--ghosts", type=int, default=65_536, help="forgotten keys remembered for each tenant")
    simulate.add_argument(
        "--hints", metavar="LIST",
        help="hints that an engine could send, made up from the trace: will-continue:0.80 (a chance, of that AUC),"
        " tool-call:0.80 (why it stopped, of that AUC), queue:10 (seconds)",
    )  # fmt: skip
    reading.add_options(simulate)
    timing.add_options(simulate)
    timing.add_fleet_options(simulate)
    decode.add_options(simulate)
    simulate.add_argument("--model", default="llama-3.1-8b", metavar="NAME", help="whose compute and bytes are counted")
    simulate.add_argument(
        "--reuse-distance", action="store_true", help="also: how far apart uses of a block are (mode replay)"
    )
    simulate.add_argument(
        "--cost", type=Path, metavar="FILE.toml", help="prices: adds what the tier costs and saves (mode replay)"
    )
    shape = simulate.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one JSON object on one line")
    shape.add_argument("--csv", action="store_true", help="rows as CSV")
    simulate.add_argument("--plot", type=Path, metavar="FILE.html", help="also write curves and table as one page")
    simulate.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        has_nodes = any(getattr(arguments, option) is not None for option in timing.FLEET_OPTIONS)
        mode = "timing" if has_nodes else one_of("--mode", arguments.mode, ("replay", "timing"))
        others = (timing.OPTIONS if mode == "replay" else _REPLAY_ONLY) + decode.OPTIONS
        where = f"mode {mode}"
        if arguments.format == _PAGES:
            where, others = f"--format {_PAGES}", decode.WITHOUT
            if (mode, arguments.part, arguments.admission) != ("replay", "all", "always"):
                raise ValueError(f"--mode, --part and --admission have no meaning in {where}; leave them out")
        for option in others:
            if getattr(arguments, option) not in (None, False, 0.0):
                raise ValueError(f"--{option.replace('_', '-')} has no meaning in {where}; leave it out")
        _check_plot(arguments)
    except ValueError as error:
        return mistake(str(error))
    except OSError as error:
        return failure(f"cannot write {arguments.plot}: {error.strerror}")
    if arguments.format == _PAGES:
        return carry_out(arguments, partial(decode.find, arguments))
    if has_nodes:
        return carry_out(arguments, partial(timing.find_fleet, arguments, _policies))
    return carry_out(
        arguments, partial(timing.find, arguments, _policies) if mode == "timing" else partial(_replay, arguments)
    )


def _check_plot(arguments: argparse.Namespace) -> None:
    """Check --plot before the long replay begins. Raises ValueError with one line; OSError."""
    plot = arguments.plot
    if plot is None:
        return
    if plot.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not plot.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    profile = None if arguments.profile is None else Path(arguments.profile)
    if plot.exists() and any(
        other and other.exists() and plot.samefile(other) for other in (arguments.trace, arguments.cost, profile)
    ):
        raise ValueError(f"--plot {plot} would overwrite the input")


def _replay(arguments: argparse.Namespace, advance: Advance) -> Results:
    from kvstore_simulator.report import replay_table, reuse_table, study_page
    from kvstore_simulator.reuse import MissRatioCurve, curves, reuse_distances

    found: list[MissRatioCurve] = []
    study = _study(arguments, partial(advance, "reading"))
    trace, model = study.trace, study.model.name
    if arguments.reuse_distance:
        found = curves(trace, reuse_distances(trace), study.count_from)
    keep()
    rows = list(study.rows(advance))
    facts = {"warm": arguments.warm} | ({"reuse_distance": [asdict(curve) for curve in found]} if found else {})
    subtitle = (
        f"{trace.lookups:,} requests, {trace.accesses:,} block accesses, {trace.distinct_blocks:,} distinct blocks of "
        f"{trace.block_tokens} tokens; compute and bytes of {model}"
    )
    return Results(
        trace, model, facts, rows, "\n\n".join(filter(None, (replay_table(rows), reuse_table(found)))),
        lambda: study_page(f"Policies on {trace.name}", subtitle, rows, found),
        "reuse distances are no rows: they are in the table, in --json and in --plot" if found else "",
    )  # fmt: skip


def _study(arguments: argparse.Namespace, progress: Any) -> Study:
    """Return the study that `arguments` describe. Raises ValueError (TraceError) with one line; OSError."""
    from kvstore_simulator.hints import NO_HINTS, parse_hints
    from kvstore_simulator.hit_value import load_prices, models
    from kvstore_simulator.policies.clairvoyant import Clairvoyant
    from kvstore_simulator.study import UNBOUNDED, Study

    policies, admissions = _policies(arguments, _POLICY, (Clairvoyant.name, UNBOUNDED))
    capacities = _capacities(_CAPACITY if arguments.capacity is None else arguments.capacity)
    if arguments.ghosts < 1:
        raise ValueError("--ghosts must be at least 1")
    prices = None if arguments.cost is None else load_prices(arguments.cost)
    trace, count_from = reading.read(arguments, progress)
    return Study(
        trace, capacities, policies, admissions, models()[arguments.model], arguments.ttl_s or None, arguments.ghosts,
        count_from, prices, NO_HINTS if arguments.hints is None else parse_hints(arguments.hints, arguments.seed),
        arguments.keep_worth,
    )  # fmt: skip


def _policies(
    arguments: argparse.Namespace, default: str, more: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the chosen policies and admissions. Raises ValueError with one line."""
    from kvstore_simulator.policies import POLICIES
    from kvstored.policy_names import ADMISSIONS, BEST, WITH_WORTH, resolve

    policies = some_of(
        "--policy",
        default if arguments.policy is None else arguments.policy,
        (*POLICIES, BEST, *more),
        every=tuple(POLICIES),
    )
    if not 0 <= arguments.keep_worth < float("inf"):
        raise ValueError(f"--keep-worth {arguments.keep_worth:g}: uses an hour, 0 (never) or more, such as 4")
    if arguments.keep_worth and not any(resolve(name) in WITH_WORTH for name in policies):
        raise ValueError(f"--keep-worth means nothing to {', '.join(policies)}: no worth is known there; add best")
    return policies, some_of("--admission", arguments.admission, ADMISSIONS, every=tuple(ADMISSIONS))


def _capacities(text: str) -> tuple[float, ...]:
    try:
        capacities = tuple(float(part) for part in words(text))
    except ValueError:
        capacities = ()
    if not capacities or not all(0 < capacity < float("inf") for capacity in capacities):
        raise ValueError(f"--capacity {text}: numbers above 0, such as 0.01,0.05,0.1 or 20000")
    for capacity in capacities:
        if capacity > _BLOCKS_MAX:
            raise ValueError(f"--capacity {capacity:g}: at most {_BLOCKS_MAX:.0e} blocks")
        if capacity > 1 and not capacity.is_integer():
            raise ValueError(f"--capacity {capacity:g}: above 1 it is blocks, which are whole; shares are 1 at most")
    return tuple(dict.fromkeys(capacities))
