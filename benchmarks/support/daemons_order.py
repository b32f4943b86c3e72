"""A trace of whole requests as a daemon would see it: gets, puts, and the hints of engines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvstore_simulator.engine_reports import ANSWER_TOKEN_NS, FIRST_TOKEN_NS
from kvstore_simulator.trace import Op, RecordedHint, Trace


def in_daemons_order(trace: Trace) -> Trace:
    """Each request as a get of its blocks and a put of those that it missed."""
    twice = np.repeat(np.arange(trace.requests), 2)
    starts = np.concatenate([[0], np.cumsum(np.diff(trace.starts)[twice])])
    blocks = np.concatenate([trace.blocks[trace.starts[at] : trace.starts[at + 1]] for at in twice.tolist()])
    columns = ("times_ns", "tenants", "kinds", "continued", "input_tokens", "output_tokens")
    return replace(
        trace, **{name: getattr(trace, name)[twice] for name in columns}, starts=starts, blocks=blocks,
        ops=np.tile(np.array([Op.GET, Op.PUT], np.uint8), trace.requests),
    )  # fmt: skip


def without_prompts(trace: Trace) -> Trace:
    """No client said how long its prompts were."""
    return replace(trace, input_tokens=np.zeros_like(trace.input_tokens))


def with_answers(trace: Trace) -> Trace:
    """When each request has ended, its engine says how long the answer was. `trace` is in the daemon's order."""
    ends_ns = trace.times_ns + FIRST_TOKEN_NS + trace.output_tokens * ANSWER_TOKEN_NS
    puts = np.flatnonzero((trace.ops == Op.PUT) & (np.diff(trace.starts) > 0) & (trace.output_tokens > 0))
    puts = puts[np.argsort(ends_ns[puts], kind="stable")]
    before = np.searchsorted(trace.times_ns, ends_ns[puts], side="right")
    hints = [
        RecordedHint(place, int(ends_ns[at]), int(trace.tenants[at]), int(trace.blocks[trace.starts[at + 1] - 1]),
             answer_tokens=int(trace.output_tokens[at]))
        for place, at in zip(before.tolist(), puts.tolist(), strict=True)
    ]  # fmt: skip
    return replace(trace, hints=tuple(hints))
