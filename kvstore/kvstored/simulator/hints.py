"""What an engine could tell of what follows, made up from the trace with a stated quality.

`will-continue:AUC` gives each request, when it ends, a score in five steps for whether its session goes on; a session
that does outscores one that does not with probability AUC. `queue:S` tells of requests S seconds before they are looked
up, as a scheduler with a queue could. Both use the future, which is what they are: an experiment in what hints are
worth. Without them nothing in a replay does.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvstored.simulator.future import next_uses
from kvstored.simulator.trace import Trace

_STEPS = (-0.9, -0.3, 0.3, 0.9)  # around the middle between the two means
_FORM = "will-continue:AUC (between 0.5 and 1) and queue:SECONDS, separated by commas"


@dataclass(frozen=True, slots=True)
class Hints:
    """`will_continue_auc`: None is no such hint; `queue_s`: 0 is none."""

    will_continue_auc: float | None = None
    queue_s: float = 0.0
    seed: int = 0


NO_HINTS = Hints()


def parse_hints(text: str, seed: int) -> Hints:
    """Raises ValueError with one line."""
    auc, queue_s = None, 0.0
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name == "will-continue" and 0.5 <= number < 1.0:
            auc = number
        elif name == "queue" and 0.0 < number <= 3600.0:
            queue_s = number
        else:
            raise ValueError(f"--hints {part.strip()!r}: takes {_FORM}")
    return Hints(auc, queue_s, seed)


def scores(trace: Trace, hints: Hints) -> npt.NDArray[np.int64]:
    """For each request 1 to 5, or 0 throughout without this hint.

    A session goes on when a later request uses the last block but one (the last is often partial) of this one.
    """
    if hints.will_continue_auc is None:
        return np.zeros(trace.requests, dtype=np.int64)
    uses = next_uses(trace)
    lengths = np.diff(trace.starts)
    end = np.maximum(trace.starts[1:] - np.where(lengths > 1, 2, 1), 0)
    goes_on = (lengths > 0) & (uses[np.minimum(end, len(uses) - 1)] < trace.requests)
    apart = 2**0.5 * NormalDist().inv_cdf(hints.will_continue_auc)
    told = np.random.default_rng(hints.seed).normal(size=trace.requests) + apart * goes_on
    steps = np.digitize(told, [apart / 2 + step for step in _STEPS])
    return (steps + 1).astype(np.int64)
