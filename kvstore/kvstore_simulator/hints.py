"""Hints that an engine could give, made up from the trace with a stated quality.

`will-continue:AUC` gives each request, when it ends, a chance in five steps that its session goes on; a session that
does outscores one that does not with probability AUC. `tool-call:AUC` says with that quality why the engine stopped: a
tool call, after which it goes on within a minute, the end of a turn, or nothing. `queue:S` announces requests S seconds
before they are looked up, as a scheduler with a queue could. `pause:NOISE` says when the session will come back, as an
engine that knows its tools could: its pause times a lognormal factor of that deviation; 0: exactly. All of them use the
future: they are experiments that measure the value of hints. Nothing else in a replay uses the future.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from kvstore_proto.v1.kvstore_pb2 import NextStep
from kvstore_simulator.policies.clairvoyant import next_uses
from kvstore_simulator.trace import Trace
from kvstored.store.policies import ChainHint

_STEPS = (-0.9, -0.3, 0.3, 0.9)  # around the middle between the two means
_TOOL_STEPS = (-0.6, 0.6)
_NEXT_STEPS = (NextStep.NEXT_STEP_END_OF_TURN, NextStep.NEXT_STEP_UNSPECIFIED, NextStep.NEXT_STEP_TOOL_CALL)
_TOOL_NS = 60_000_000_000
_APART_MAX, _APART_SURE = 20.0, 1e-9
_NOISE_MAX = 4.0
_FORM = (
    "will-continue:AUC, tool-call:AUC (both between 0.5 and 1), queue:SECONDS and pause:NOISE (0 to 4), "
    "separated by commas"
)


@dataclass(frozen=True, slots=True)
class HintOptions:
    """The options for making up an engine's hints from a trace. `will_continue_auc`, `tool_call_auc` and `pause_noise`
    are the quality of each kind of hint; None turns the kind off. Requests are announced `queue_s` seconds before they
    arrive; 0 turns this off.
    """

    will_continue_auc: float | None = None
    queue_s: float = 0.0
    seed: int = 0
    tool_call_auc: float | None = None
    pause_noise: float | None = None


NO_HINTS = HintOptions()


def parse_hints(text: str, seed: int) -> HintOptions:
    """Return the options of made-up hints that `text` describes, such as "will-continue:0.80,queue:10". Raises
    ValueError with one line.
    """
    auc, tool_auc, queue_s, noise = None, None, 0.0, None
    for part in text.split(","):
        name, _, value = part.strip().partition(":")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if name == "will-continue" and 0.5 <= number < 1.0:
            auc = number
        elif name == "tool-call" and 0.5 <= number < 1.0:
            tool_auc = number
        elif name == "queue" and 0.0 < number <= 3600.0:
            queue_s = number
        elif name == "pause" and 0.0 <= number <= _NOISE_MAX:
            noise = number
        else:
            raise ValueError(f"--hints {part.strip()!r}: takes {_FORM}")
    return HintOptions(auc, queue_s, seed, tool_auc, noise)


def made_up(trace: Trace, hints: HintOptions) -> list[ChainHint | None]:
    """Return for each request of `trace` the hint that an engine gives at its end, or None if `hints` turns these hints
    off. Times in `due_ns` count from the first request. A session counts as continued if a later request uses its last
    block but one, because the last block is often partial.
    """
    if hints.will_continue_auc is None and hints.tool_call_auc is None and hints.pause_noise is None:
        return [None] * trace.requests
    uses = next_uses(trace)
    lengths = np.diff(trace.starts)
    end = np.maximum(trace.starts[1:] - np.where(lengths > 1, 2, 1), 0)
    following = np.where(lengths > 0, uses[np.minimum(end, len(uses) - 1)], trace.requests)
    goes_on = following < trace.requests
    chance = np.random.default_rng(hints.seed)
    chances: list[float | None] = [None] * trace.requests
    next_steps = [NextStep.NEXT_STEP_UNSPECIFIED] * trace.requests
    if hints.will_continue_auc is not None:
        steps = _steps(goes_on, hints.will_continue_auc, _STEPS, chance)
        chances = ((steps + 0.5) / (len(_STEPS) + 1)).tolist()
    if hints.tool_call_auc is not None:
        later_ns = trace.times_ns[np.minimum(following, trace.requests - 1)]
        is_soon = goes_on & (later_ns - trace.times_ns < _TOOL_NS)
        next_steps = [_NEXT_STEPS[step] for step in _steps(is_soon, hints.tool_call_auc, _TOOL_STEPS, chance).tolist()]
    due = [None] * trace.requests if hints.pause_noise is None else _due(trace, goes_on, following, hints)
    return [ChainHint(*each) for each in zip(chances, due, next_steps, strict=True)]


def _due(
    trace: Trace, goes_on: npt.NDArray[np.bool_], following: npt.NDArray[np.int64], hints: HintOptions
) -> list[int | None]:
    since_ns = trace.times_ns - trace.times_ns[0]
    pause_ns = since_ns[np.minimum(following, trace.requests - 1)] - since_ns
    noise = np.random.default_rng(hints.seed + 1).lognormal(0.0, hints.pause_noise or 0.0, trace.requests)
    due_ns = (since_ns + pause_ns * noise).astype(np.int64).tolist()
    return [at if known else None for at, known in zip(due_ns, goes_on.tolist(), strict=True)]


def _steps(
    truth: npt.NDArray[np.bool_], auc: float, steps: tuple[float, ...], chance: np.random.Generator
) -> npt.NDArray[np.int64]:
    """Return a noisy score of `truth`, as the number of the step that it reaches, from 0 up."""
    apart = _apart(auc, steps)
    score = chance.normal(size=len(truth)) + apart * truth
    return np.digitize(score, [apart / 2 + step for step in steps]).astype(np.int64)


def _apart(auc: float, steps: tuple[float, ...]) -> float:
    """Return the distance between the means of the two kinds' scores that gives this AUC after rounding to `steps`;
    equal steps count half.
    """
    near, far = 0.0, _APART_MAX
    while far - near > _APART_SURE:
        middle = (near + far) / 2
        if _auc(middle, steps) < auc:
            near = middle
        else:
            far = middle
    return (near + far) / 2


def _auc(apart: float, steps: tuple[float, ...]) -> float:
    normal = NormalDist()
    cuts = [apart / 2 + step for step in steps]
    no, yes = (np.diff([0.0, *(normal.cdf(cut - mean) for cut in cuts), 1.0]) for mean in (0.0, apart))
    return float(yes @ (np.cumsum(no) - no / 2))
