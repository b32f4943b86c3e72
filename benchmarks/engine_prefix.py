"""Shared prefixes: how many prompt tokens are computed, against the least that is possible?

Prompts of 512 tokens, of which 50 or 90 % are one of two system prompts, from 16 clients at once. The ideal computes
each distinct block of 16 tokens once for all clients, and the tokens that fill no block once for each request.

Expected: 1.00. Over it there would be requests that began while another still computed the prefix they share: they
have to wait for it, not compute it again.

    python benchmarks/engine_prefix.py [--json] [--quick]
"""

from __future__ import annotations

import sys

from support.engine import THREADS, model_path
from support.report import Row, main, progress

from kvstore_engine.bench.arrivals import ClosedLoop
from kvstore_engine.bench.loads import LoadSettings
from kvstore_engine.bench.opened_engine import BenchEngine
from kvstore_engine.bench.study import StudySettings, study_engine

CLIENTS, TARGET = 16, 1.05


def measure(quick: bool) -> list[Row]:
    load = LoadSettings(requests=24 if quick else 96, prompt_tokens=512, generate_tokens=8)
    wanted = StudySettings(("shared-50", "shared-90"), (ClosedLoop(CLIENTS),), load)
    base = BenchEngine(model_path("q4_0"), context=0, sequences=CLIENTS, threads=THREADS)
    rows = []
    for case in study_engine(base, wanted, progress):
        computed = case.summary.computed_tokens
        assert computed is not None, "an engine in this process says what it reused"
        rows.append(Row(f"evaluated_{case.load}", computed, "tokens", case.ideal_tokens, "ideal", target=TARGET))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__))
