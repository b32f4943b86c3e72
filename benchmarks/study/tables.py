"""Forms what is said of single results: means and spreads, differences of pairs, verdicts. Pure.

A table takes a group together: the windows of one trace, or its draws. `share` is a part of the gap between LRU and the
clairvoyant. Two policies are compared case by case, so that what a case brings to both of them drops out.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import fmean, pstdev
from typing import Any

from kvstore_console import page as markup
from kvstore_console.axes import Unit, log_axis
from kvstore_console.charts import Curve, line_chart, merged
from kvstore_console.table import render_table
from kvstore_simulator.hit_value import DEFAULT_MODEL
from study.sources import HINTS, OURS, SEEDS, Record

_WORDS = {True: "met", False: "MISSED", None: "-"}
_RATIO = Unit(lambda ratio: f"{ratio:.2f}")
LRU, CLAIRVOYANT, UNBOUNDED = "lru", "clairvoyant", "unbounded"
ABOVE_UP_TO = 0.10  # capacities where ours has to be above LRU and the best classical policy in compute saved
NOT_BELOW = 0.002  # and nowhere further below them
_DRAWS_MIN = 8
Line = dict[str, Any]
Cell = dict[tuple[str, int], Record]  # by case and draw


def hits_text(lines: Sequence[Line]) -> str:
    """A table for each trace and part: a policy a row, three columns a capacity."""
    parts = []
    for (trace, part), group in groupby(lines, key=lambda line: (line["trace"], line["part"])):
        found = list(group)
        capacities = list(dict.fromkeys(line["capacity"] for line in found))
        policies = list(dict.fromkeys(line["policy"] for line in found))
        by_name = {(line["policy"], line["capacity"]): line for line in found}
        count = found[0]["n"]
        head = [f"{trace}, {part} ({count})"]
        for capacity in capacities:
            head += [f"{capacity:.0%}", "±", "least", "most", "share"]
        rows = []
        for policy in policies:
            row = [policy]
            for capacity in capacities:
                line = by_name.get((policy, capacity))
                if line is None:
                    row += [""] * 5
                    continue
                row += [f"{line['mean']:.4f}", f"{line['std']:.4f}", f"{line['min']:.4f}", f"{line['max']:.4f}"]
                row.append("" if line["share"] is None else f"{line['share']:.2f}")
            rows.append(row)
        parts.append(render_table([head[0], *(f">{name}" for name in head[1:])], rows))
    return "\n\n".join(parts)


def lines_text(lines: Sequence[Line]) -> str:
    """One line a row, all of its facts."""
    return render_table(headings_of(lines), rows_of(lines))


def headings_of(lines: Sequence[Line]) -> list[str]:
    """Return the headings as `render_table` takes them; nothing for no lines."""
    names = [name.replace("_", " ") for name in (lines[0] if lines else ())]
    return [name if at < 2 else f">{name}" for at, name in enumerate(names)]


def rows_of(lines: Sequence[Line]) -> list[list[str]]:
    """The cells below the headings."""
    return [[_cell(name, line.get(name)) for name in lines[0]] for line in lines]


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _WORDS[value]
    if name == "capacity":
        return f"{value:.0%}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def as_csv(sections: dict[str, list[Line]]) -> str:
    """All sections in one table; a column that a section lacks is empty."""
    names = list(dict.fromkeys(name for lines in sections.values() for line in lines for name in line))
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=["section", *names], lineterminator="\n")
    writer.writeheader()
    for section, lines in sections.items():
        writer.writerows({"section": section, **line} for line in lines)
    return out.getvalue()


def study_page(found: dict[str, list[Line]], titles: dict[str, str], hits: str) -> str:
    """`hits` names the section that is drawn."""
    figures = [
        _figure(f"{trace}, {part}", list(group))
        for (trace, part), group in groupby(found.get(hits, []), key=lambda line: (line["trace"], line["part"]))
    ]
    tables = [
        markup.section(titles[section], markup.html_table(headings_of(lines), rows_of(lines)))
        for section, lines in found.items()
        if lines
    ]
    about = "hit ratios are prefix-closed; every part starts with an empty tier"
    return markup.page("Policy study", about, [markup.charts(figures), *tables])


def _figure(title: str, lines: Sequence[Line]) -> str:
    curves = []
    for policy in dict.fromkeys(line["policy"] for line in lines):
        points = [(line["capacity"], line["mean"]) for line in lines if line["policy"] == policy]
        curves.append(Curve(policy, points, mark="limit" * (policy in (UNBOUNDED, CLAIRVOYANT)), has_dots=True))
    capacities = [line["capacity"] for line in lines]
    x = log_axis(min(capacities), max(capacities), lambda share: f"{share:.1%}", "share of the distinct blocks")
    y = _RATIO.axis([line["mean"] for line in lines])
    return line_chart(title, "hit ratio", merged(curves, x, y), x, y)


@dataclass(frozen=True, slots=True)
class Spread:
    n: int
    mean: float
    std: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        seen = list(values)
        return cls(len(seen), fmean(seen), pstdev(seen), min(seen), max(seen))

    def as_line(self) -> Line:
        facts = {"mean": self.mean, "std": self.std, "min": self.low, "max": self.high}
        return {"n": self.n, **{name: round(value, 6) for name, value in facts.items()}}


class Book:
    """Records by what they are of."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._cells: dict[tuple[str, str, float, str, str], Cell] = {}
        for record in records:
            name = (record["trace"], record["group"], record["capacity"], record["policy"], record["knowledge"])
            self._cells.setdefault(name, {})[record["part"], record["draw"]] = record

    def cell(self, at: tuple[str, str, float], policy: str, knowledge: str = "") -> Cell:
        return self._cells.get((*at, policy, knowledge), {})

    def places(self) -> list[tuple[str, str, float]]:
        """Trace, group and capacity, in the order of the records."""
        return list(dict.fromkeys(name[:3] for name in self._cells))

    def policies(self, at: tuple[str, str, float]) -> list[str]:
        return list(dict.fromkeys(name[3] for name in self._cells if name[:3] == at and not name[4]))

    def knowledge(self, at: tuple[str, str, float]) -> list[str]:
        return list(dict.fromkeys(name[4] for name in self._cells if name[:3] == at and name[4]))


def _mean(cell: Cell) -> float:
    return fmean(record["hit_ratio"] for record in cell.values())


def _saved(cell: Cell, model: str = DEFAULT_MODEL) -> float:
    return fmean(record["compute_saved"][model] for record in cell.values())


def _share(value: float, low: float, high: float) -> float | None:
    return round((value - low) / (high - low), 4) if high - low > 1e-9 else None


def _place(at: tuple[str, str, float]) -> Line:
    return {"trace": at[0], "part": at[1], "capacity": at[2]}


def hit_lines(book: Book) -> list[Line]:
    """Hit ratio of every policy: mean and spread over windows or draws, and its share of the gap."""
    lines: list[Line] = []
    for at in book.places():
        low, high = book.cell(at, LRU), book.cell(at, CLAIRVOYANT)
        if not low or not high:
            continue
        room = Spread.of(record["unbounded"] for record in low.values())
        lines.append({**_place(at), "policy": UNBOUNDED, **room.as_line(), "share": None, "compute_saved": None})
        for policy in book.policies(at):
            cell = book.cell(at, policy)
            spread = Spread.of(record["hit_ratio"] for record in cell.values())
            share = _share(spread.mean, _mean(low), _mean(high))
            saved = round(_saved(cell), 6)
            lines.append({**_place(at), "policy": policy, **spread.as_line(), "share": share, "compute_saved": saved})
    return lines


def compute_lines(book: Book) -> list[Line]:
    """Compute that ours saves against LRU and the best classical policy, at the model where it leads by the least."""
    lines: list[Line] = []
    for at in book.places():
        ours = book.cell(at, OURS)
        others = {name: book.cell(at, name) for name in book.policies(at) if name not in (OURS, CLAIRVOYANT)}
        if not ours or LRU not in others:
            continue
        leads: dict[str, float] = {}
        for model in next(iter(ours.values()))["compute_saved"]:
            leads[model] = _saved(ours, model) - max(_saved(cell, model) for cell in others.values())
        worst = min(leads, key=lambda model: leads[model])
        best = max(others, key=lambda name: _saved(others[name], worst))
        single = min(
            record["compute_saved"][worst] - others[best][case]["compute_saved"][worst]
            for case, record in ours.items()
            if case in others[best]
        )
        lead = leads[worst]
        lines.append({
            **_place(at), "model": worst, "ours": round(_saved(ours, worst), 6),
            "lru": round(_saved(others[LRU], worst), 6), "best_classical": best,
            "classical": round(_saved(others[best], worst), 6), "lead": round(lead, 6),
            "least_lead_of_a_case": round(single, 6),
            "above": lead > 0 if at[2] <= ABOVE_UP_TO else None, "not_below": lead >= -NOT_BELOW,
        })  # fmt: skip
    return lines


def gain_lines(book: Book, *, hints: bool) -> list[Line]:
    """Return what ours gains by knowledge, over the same case without: hints of a stated quality, or an oracle's."""
    lines: list[Line] = []
    for at in book.places():
        plain = {case: record for (case, _), record in book.cell(at, OURS).items()}
        low, high = book.cell(at, LRU), book.cell(at, CLAIRVOYANT)
        for knowledge in book.knowledge(at):
            cell = book.cell(at, OURS, knowledge)
            pairs = [
                (record["hit_ratio"], plain[case]["hit_ratio"]) for (case, _), record in cell.items() if case in plain
            ]
            if knowledge.startswith(HINTS) != hints or not pairs:
                continue
            gain = Spread.of(after - before for after, before in pairs)
            with_it, without = fmean(after for after, _ in pairs), fmean(before for _, before in pairs)
            bounds = (_mean(low), _mean(high)) if low and high else (0.0, 0.0)
            lines.append({
                **_place(at), "told": knowledge.removeprefix(HINTS), "without": round(without, 6),
                "with": round(with_it, 6), **{f"gain_{name}": value for name, value in gain.as_line().items()},
                "share_without": _share(without, *bounds), "share_with": _share(with_it, *bounds),
            })  # fmt: skip
    return lines


def reference_lines(book: Book, figures: Sequence[Line]) -> list[Line]:
    """Published figures of traces that are known by their counts. Drawn traces: the figure is one draw of many, so it
    has to be within what our draws span; a few of them say nothing.
    """
    lines: list[Line] = []
    for at in book.places():
        for figure in figures:
            cell = book.cell(at, figure["policy"])
            wanted = figure["hit_ratio"].get(f"{at[2]:g}")
            first = next(iter(cell.values()), None)
            if (
                wanted is None
                or first is None
                or any(first[name] != figure[name] for name in ("requests", "distinct_blocks"))
            ):
                continue
            spread = Spread.of(record["hit_ratio"] for record in cell.values())
            is_drawn = at[1] == SEEDS
            off = max(spread.low - wanted, wanted - spread.high, 0.0) if is_drawn else abs(spread.mean - wanted)
            within = float(figure.get("within", 0.001))
            lines.append({
                **_place(at), "policy": figure["policy"], "published": wanted, **spread.as_line(),
                "off": round(off, 6), "met": None if is_drawn and spread.n < _DRAWS_MIN else off <= within,
            })  # fmt: skip
    return lines
