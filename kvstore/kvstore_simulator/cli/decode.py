"""`kvstored simulate --format pages`: the KVFlow table, of a decode that keeps K and V in slow memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_console.command_line import some_of
from kvstore_simulator.cli.results import Advance, Results

if TYPE_CHECKING:
    from kvstore_simulator.decode import DecodeRow, DecodeStudy
    from kvstore_simulator.machine import Machine, MediumSpec

OPTIONS = ("scratch", "cxl", "each_token")
WITHOUT = (  # options of other formats
    "capacity", "hints", "cost", "reuse_distance", "devices", "tiers", "gpu", "speed", "without", "predictor",
    "predictor_model", "nodes", "remote", "routing", "window_s", "sessions", "group_tokens", "as_recorded", "plot",
    "warm", "ttl_s", "keep_worth",
)  # fmt: skip
_PROFILE, _POLICY = "h100", "w-tinylfu"
_CXL = "cxl"


def add_options(simulate: argparse.ArgumentParser) -> None:
    decode = simulate.add_argument_group("format pages")
    decode.add_argument("--scratch", metavar="SIZE", help="fast memory for pages (default: sram of the profile)")
    decode.add_argument(
        "--cxl", metavar="LIST", help="latency=300ns,bandwidth=36GB/s of the CXL rows (default: the profile's)"
    )
    decode.add_argument("--each-token", action="store_true", help="also a table with a line for each token")


def find(arguments: argparse.Namespace, advance: Advance) -> Results:
    """Run the study of decoding that `arguments` describe, and return its results. `advance` is called with the
    progress. Raises OSError, or ValueError (TraceError) with one line.
    """
    study = _study(arguments, partial(advance, "reading"))
    rows: list[DecodeRow] = []
    total = 2 * len(study.slow) * (1 + len(study.policies))
    for row in study.rows():
        rows.append(row)
        advance(f"{row.plan} from {row.slow}", len(rows), total)
    shown = [row.as_json(_baseline_of(row, rows)) for row in rows]
    trace = study.trace
    facts = {
        "mode": "decode", "about": trace.about, "profile": study.machine.name, "scratch_bytes": study.scratch_bytes,
        "kept_pages": study.kept_pages, "page_bytes": trace.page_bytes,
    }  # fmt: skip
    if arguments.csv:
        shown = [{name: value for name, value in row.items() if name != "tokens"} for row in shown]
    return Results(trace, trace.model.name, facts, shown, _text(study, rows, shown, arguments.each_token))


def _baseline_of(row: DecodeRow, rows: Sequence[DecodeRow]) -> DecodeRow:
    return next(each for each in rows if (each.slow, each.overlaps) == (row.slow, row.overlaps))


def _study(arguments: argparse.Namespace, progress: Any) -> DecodeStudy:
    from kvstore_console.units import human_bytes, parse_size
    from kvstore_simulator.decode import DecodeStudy
    from kvstore_simulator.machine import load_machine
    from kvstore_simulator.page_trace import read_pages
    from kvstore_simulator.policies import POLICIES

    policies = some_of("--policy", arguments.policy or _POLICY, tuple(POLICIES), every=tuple(POLICIES))
    machine = load_machine(arguments.profile or _PROFILE)
    trace = read_pages(Path("/dev/stdin") if str(arguments.trace) == "-" else arguments.trace, progress)
    scratch_bytes = machine.media["sram"].capacity_bytes
    if arguments.scratch is not None:
        try:
            scratch_bytes = parse_size(arguments.scratch)
        except ValueError as error:
            raise ValueError(f"--scratch {arguments.scratch}: {error}") from None
    if scratch_bytes < trace.page_bytes:
        raise ValueError(f"--scratch {human_bytes(scratch_bytes)} holds no page of {human_bytes(trace.page_bytes)}")
    return DecodeStudy(trace, machine, scratch_bytes, _slow(arguments.cxl, machine), policies)


def _slow(cxl: str | None, machine: Machine) -> list[MediumSpec]:
    """Return the engine's own memory, and the CXL memory of the profile with the rates `cxl`."""
    from kvstore_simulator.options import read_cxl

    own = machine.media[machine.engine_tier]
    if _CXL in machine.media:
        changed = read_cxl(cxl or "", machine.media[_CXL])
        return [changed] if own.name == _CXL else [own, changed]
    if cxl is not None:
        raise ValueError(f"--cxl: the profile {machine.name} has no [tiers.cxl]")
    return [own]


def _text(study: DecodeStudy, rows: Sequence[DecodeRow], shown: Sequence[dict[str, Any]], is_each_token: bool) -> str:
    from kvstore_console.table import render_table
    from kvstore_console.units import human_bytes, human_seconds

    trace, tokens = study.trace, len(study.trace.steps)
    head = (
        f"{trace.about or trace.name}: {tokens} tokens, {trace.steps[0].pages} to {trace.steps[-1].pages} pages of "
        f"{trace.block_tokens} tokens in {trace.model.layers} layers; {study.machine.name}, scratch "
        f"{human_bytes(study.scratch_bytes)}, {study.kept_pages:,} pages of it are kept from token to token"
    )
    headings = ["SLOW", "PLAN", "OVERLAP", ">FAST READS", ">", ">SLOW READS", ">", ">SCRATCH HITS", ">EXPOSED", ">"]
    lines = [
        [
            row["slow"], " ".join(filter(None, (row["plan"], row["policy"]))), "on" if row["overlap"] else "off",
            human_bytes(round(row["read_bytes"])), _change(row["read_bytes_ratio"]),
            human_bytes(round(row["slow_bytes"])), _change(row["slow_bytes_ratio"]), f"{row['scratch_hits']:.1%}",
            f"{human_seconds(row['exposed_s'] / tokens)}/token", _change(row["exposed_s_ratio"]),
        ]
        for row in shown
    ]  # fmt: skip
    parts = [head, render_table(headings, lines)]
    if is_each_token:
        headings = ["TOKEN", "SLOW", "PLAN", "OVERLAP", ">FAST READS", ">SLOW READS", ">SCRATCH HITS", ">EXPOSED"]
        lines = [
            [
                str(number), row.slow, " ".join(filter(None, (row.plan, row.policy))), "on" if row.overlaps else "off",
                human_bytes(round(cost.read_bytes)), human_bytes(round(cost.slow_bytes)),
                f"{cost.hits / cost.pages:.1%}", human_seconds(cost.exposed_s),
            ]
            for number in range(tokens)
            for row in rows
            for cost in (row.tokens[number],)
        ]  # fmt: skip
        parts.append(render_table(headings, lines))
    return "\n\n".join(parts)


def _change(ratio: float | None) -> str:
    return "" if ratio is None or ratio == 1 else f"{ratio - 1:+.0%}"
