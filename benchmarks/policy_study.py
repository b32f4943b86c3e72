"""Reprints every figure of the policy study: what `best` hits and saves, what hints add, what an oracle would add.

    benchmarks/policy_study.py --traces DIR --results study.jsonl
    benchmarks/policy_study.py conversation.jsonl.gz agents.jsonl.gz --seeds 8 --sections hits,compute --json
    benchmarks/policy_study.py --quick

Traces are files in Mooncake's or Claude Code's format or our own recordings; the first line identifies the format.
Without any, two small made-up ones show what the tables look like. Every window (the whole, halves, quarters of the
time) starts with an empty tier; sessions without a start of their own are drawn into an hour, once for each seed. All
replays drive the daemon's own policy objects.

hits       mean and spread of every policy's hit ratio, and its share of the gap between LRU and the clairvoyant
compute    prefill saved by ours against LRU and the best classical policy, at the model where it leads by the least;
           `above` up to 10 % of the blocks, `not below`: nowhere more than 0.002 under them
hints      ours with made-up engine hints of a stated quality less ours without, case by case
oracle     ours with knowledge of the future, one kind after the other, up to the clairvoyant
reference  published hit ratios of published traces, within 0.001 (benchmarks/study/figures.toml, or --figures)

With --results each replay is a line of that file, and a run that was cut off goes on where it was; results of other
code than what is installed are not taken. Exit status: 0; 1 when a verdict on given traces is MISSED; 2 for a mistake.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from study import oracle
from study.sources import (
    HALVES,
    HINTS,
    OURS,
    QUARTERS,
    SEEDS,
    WHOLE,
    Case,
    Job,
    Record,
    Results,
    cases_of,
    files_in,
    records_of,
    run_all,
)
from study.tables import (
    CLAIRVOYANT,
    LRU,
    Book,
    Line,
    as_csv,
    compute_lines,
    gain_lines,
    hit_lines,
    hits_text,
    lines_text,
    reference_lines,
    study_page,
)
from support.report import progress

from kvstore_simulator.hints import parse_hints
from kvstore_simulator.policies import POLICIES
from kvstore_simulator.trace import TraceError

_TICK_MS = 3000
_SYSTEM_PROMPTS = 3
HITS, COMPUTE, HINTED, ORACLE, REFERENCE = SECTIONS = ("hits", "compute", "hints", "oracle", "reference")
CAPACITIES = (0.01, 0.02, 0.05, 0.1, 0.25)
QUICK_CAPACITIES = KNOWLEDGE_CAPACITIES = (0.01, 0.05, 0.1)  # the latter: where hints and oracles are tried
FIGURES = Path(__file__).parent / "study" / "figures.toml"
_SAME = "lfu"  # as lfu-ttl without a time to live, which is how it ships
_TITLES = {
    HITS: "Hit ratio: mean over the part's windows or draws, deviation, least, most, share of LRU to clairvoyant",
    COMPUTE: "Compute saved, at the model where ours leads by the least",
    HINTED: "Ours with hints",
    ORACLE: "Ours with knowledge of the future",
    REFERENCE: "Published figures",
}


def write_standins(directory: Path, *, requests: int, sessions: int) -> list[Path]:
    """Write a chat of `requests` requests (Mooncake's format), and agents of `sessions` sessions (Claude Code's)."""
    chat, agents = directory / "made-up-chat.jsonl.gz", directory / "made-up-agents.jsonl.gz"
    _write(chat, _chat(random.Random(1), requests))
    _write(agents, [_agent(random.Random(number), number) for number in range(sessions)])
    return [chat, agents]


def _write(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)


def _chat(chance: random.Random, requests: int) -> list[dict[str, Any]]:
    due: list[tuple[float, int, list[int]]] = []  # when a session goes on, and the blocks it has by then
    fresh, at_ms, rows = _SYSTEM_PROMPTS + 1, 0.0, []
    for number in range(requests):
        at_ms += chance.expovariate(1 / 300)
        if due and due[0][0] <= at_ms:
            blocks, more = heappop(due)[2], round(chance.expovariate(1 / 3))
        else:
            blocks, more = [1 + chance.randrange(_SYSTEM_PROMPTS)], round(chance.lognormvariate(2.3, 1.1))
        blocks = [*blocks, *range(fresh, fresh + more + 1)]
        fresh += more + 1
        answer = round(chance.lognormvariate(5.0, 1.0)) + 1
        rows.append({
            "timestamp": round(at_ms) // _TICK_MS * _TICK_MS, "input_length": len(blocks) * 512 - 100,
            "output_length": answer, "hash_ids": blocks,
        })  # fmt: skip
        if chance.random() < (0.55 if answer < 150 else 0.25):
            heappush(due, (at_ms + 1000 * chance.lognormvariate(4.0, 0.8), number, blocks))
    return rows


def _agent(chance: random.Random, number: int) -> dict[str, Any]:
    at_s, length, fresh = 0.0, 8 * chance.randrange(20, 100), 100_000
    runs, requests = [1, length], []
    while True:
        total = sum(runs[1::2])
        requests.append([at_s, total * 64, chance.randrange(50, 800), "n", 5.0, list(runs)])
        if chance.random() < 0.05:
            return {"id": f"made-up-{number}", "models": [], "tool": 0, "sys": 0, "reqs": requests}
        at_s += chance.expovariate(1 / 10) if chance.random() < 0.8 else chance.lognormvariate(5.0, 1.0)
        if chance.random() < 0.03:  # the history is edited: what follows is new
            runs = [1, max(8, runs[1] // 2)]
        more = chance.randrange(4, 60)
        runs += [fresh, more]
        fresh += more


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="policy-study-") as scratch:
        try:
            paths = [*options.trace, *(files_in(options.traces) if options.traces else [])]
            is_made_up = not paths
            if is_made_up:
                progress("no traces given: two made-up ones stand in for them")
                small = options.quick
                paths = write_standins(Path(scratch), requests=600 if small else 4000, sessions=8 if small else 60)
            figures = tomllib.loads(options.figures.read_text())["figure"]
            sections = _listed(options.sections, SECTIONS)
            jobs = list(_jobs(options, list(_cases(options, paths)), sections))
            results = Results(options.results)
        except (TraceError, ValueError, KeyError) as error:
            print(f"policy_study: {error}", file=sys.stderr)
            return 2
        except OSError as error:
            print(f"policy_study: cannot read {error.filename}: {error.strerror}", file=sys.stderr)
            return 2
        run_all(jobs, results, processes=options.processes, niceness=options.nice, report=_Progress())
        found = _lines(Book(records_of(jobs, results)), figures, sections)
    if options.html is not None:
        try:
            options.html.write_text(study_page(found, _TITLES, HITS), encoding="utf-8")
        except OSError as error:
            print(f"policy_study: cannot write {options.html}: {error.strerror}", file=sys.stderr)
            return 2
    _print(options, found, is_made_up)
    verdicts = [line.get(name) for lines in found.values() for line in lines for name in ("above", "not_below", "met")]
    return 1 if False in verdicts and not is_made_up else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="*", metavar="TRACE", help="a trace's file")
    parser.add_argument("--traces", type=Path, metavar="DIR", help="every *.jsonl and *.jsonl.gz in it")
    parser.add_argument("--sections", default=",".join(SECTIONS), metavar="LIST", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--parts", default=f"{WHOLE},{HALVES},{QUARTERS}", metavar="LIST", help="windows in time")
    parser.add_argument("--policies", default="all", metavar="LIST", help="classical ones (default all)")
    parser.add_argument(
        "--capacity", metavar="LIST", help="shares of the distinct blocks (default 0.01,0.02,0.05,0.1,0.25)"
    )
    parser.add_argument("--seeds", type=int, help="draws of session starts (default 4; quick: 2)")
    parser.add_argument("--sessions", type=int, help="sessions of a draw (default: all)")
    parser.add_argument("--window-s", type=float, default=3600.0, help="sessions start within it (default 3600)")
    parser.add_argument("--hints", default="will-continue:0.80,queue:10", metavar="LIST", help="as `kvstored simulate`")
    parser.add_argument("--draws", type=int, help="draws of made-up hints for a window (default 3; quick: 1)")
    parser.add_argument("--oracle-seeds", type=int, default=2, help="of the seeds, so many are shown to the oracle")
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="FILE.toml", help="published figures")
    parser.add_argument("--results", type=Path, metavar="FILE.jsonl", help="keeps each replay; a later run goes on")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--nice", type=int, default=10)
    parser.add_argument("--quick", action="store_true", help="a minute at most without traces of your own")
    parser.add_argument("--html", type=Path, metavar="FILE.html", help="also charts and tables as one page")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--json", action="store_true", help="one object as the last line")
    shape.add_argument("--csv", action="store_true")
    return parser


def _cases(options: argparse.Namespace, paths: Sequence[Path]) -> Iterator[Case]:
    seeds = options.seeds if options.seeds is not None else 2 if options.quick else 4
    if seeds < 1 or options.processes < 1:
        raise ValueError("--seeds and --processes must be at least 1")
    known = (WHOLE, HALVES, QUARTERS)
    parts = (WHOLE,) if options.quick else _listed(options.parts, known)
    yield from cases_of(paths, groups=parts, seeds=seeds, sessions=options.sessions, window_s=options.window_s)


def _jobs(options: argparse.Namespace, cases: Sequence[Case], sections: Sequence[str]) -> Iterator[Job]:
    """The jobs that the sections need, the most informative first."""
    capacities = QUICK_CAPACITIES if options.quick else CAPACITIES
    if options.capacity:
        capacities = tuple(float(part) for part in options.capacity.split(","))
        if not all(0 < capacity <= 1 for capacity in capacities):
            raise ValueError(f"--capacity {options.capacity}: shares of the distinct blocks, above 0, at most 1")
    classical = [name for name in POLICIES if name not in (OURS, _SAME)]
    if options.policies != "all":
        classical = list(_listed(options.policies, [name for name in POLICIES if name != OURS]))
    bounds = [LRU, CLAIRVOYANT]
    for case in cases:
        everything = [*bounds, OURS, *(name for name in classical if name not in bounds)]
        for policy in everything if {HITS, COMPUTE} & set(sections) else [*bounds, OURS]:
            yield from (Job(case, policy, capacity) for capacity in capacities)
    parse_hints(options.hints, 0)
    tried = [capacity for capacity in capacities if capacity in KNOWLEDGE_CAPACITIES] or list(capacities)
    draws = options.draws if options.draws is not None else 1 if options.quick else 3
    for case in cases if HINTED in sections else ():
        for draw in (case.seed,) if case.group == SEEDS else range(draws):
            yield from (Job(case, OURS, capacity, HINTS + options.hints, draw) for capacity in tried)
    for case in cases if ORACLE in sections else ():
        if case.group == SEEDS and case.seed >= options.oracle_seeds:
            continue
        for knowledge in (oracle.UNPRIMED, *oracle.KNOWLEDGE):
            yield from (Job(case, OURS, capacity, knowledge) for capacity in tried)


def _listed(text: str, known: Sequence[str]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is unknown; known: {', '.join(known)}")
    return names


def _lines(book: Book, figures: Sequence[Line], sections: Sequence[str]) -> dict[str, list[Line]]:
    made = {
        HITS: lambda: hit_lines(book),
        COMPUTE: lambda: compute_lines(book),
        HINTED: lambda: gain_lines(book, hints=True),
        ORACLE: lambda: gain_lines(book, hints=False),
        REFERENCE: lambda: reference_lines(book, figures),
    }
    return {section: made[section]() for section in SECTIONS if section in sections}


class _Progress:
    """A line after each replay."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()

    def __call__(self, done: int, total: int, record: Record) -> None:
        left_s = (time.monotonic() - self._began_s) / done * (total - done)
        given = f", given {record['knowledge']}" if record["knowledge"] else ""
        progress(
            f"[{done}/{total}, {left_s / 60:.0f} min left] {record['trace']} {record['part']}: {record['policy']}"
            f"{given} at {record['capacity']:.0%}: {record['hit_ratio']:.4f} in {record['seconds']:.1f} s"
        )


def _print(options: argparse.Namespace, found: dict[str, list[Line]], is_made_up: bool) -> None:
    if options.json:
        print(json.dumps({"made_up_traces": is_made_up, **found}, ensure_ascii=False))
    elif options.csv:
        print(as_csv(found), end="")
    else:
        for section, lines in found.items():
            text = (hits_text if section == HITS else lines_text)(lines)
            print(f"{_TITLES[section]}\n\n{text or 'no figures for these traces'}\n")


if __name__ == "__main__":
    sys.exit(main())
