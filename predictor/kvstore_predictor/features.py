"""What is known of a chain when it is used, as small numbers: the classes that hazard tables are kept for.

Some come from the structure alone (lengths in blocks, turns, gaps), which every daemon sees; some from what an engine
reports of a request (tokens of prompt and answer). What is not known is bucket 0 of its own; an answer is AWAITED.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple, Protocol

_NEW_BLOCKS = (2, 5, 15)
_LENGTH = (3, 7, 15, 40)
_TURNS = (2, 3, 5, 9)
_ANSWER_TOKENS = (30, 100, 250, 500)
_GAP_S = tuple(1.5 * 1.6**step for step in range(11))
_TEXT_TOKENS = tuple(16 * 2**step for step in range(11))
AWAITED = -1  # may be known later: as long as it is not, the step above stands for it
CHANCES, NEXT_STEPS = 5, 4  # how many values a hint has


class Expectation(Protocol):
    """What an engine expects of a chain, as a `Hint` has it: None and 0 are not said."""

    @property
    def will_continue(self) -> float | None: ...

    @property
    def next_step(self) -> int: ...


class Features(NamedTuple):
    """Of one use of a chain. `kind`: 0 new, 1 continued, 2 new but for two blocks or more of others. `chance` and
    `next_step`: what an engine expects, a chance to go on by fifths and the wire's NextStep; 0 is not said.
    """

    kind: int
    new_blocks: int
    length: int
    turn: int
    answer: int
    gap: int
    pace: int
    text: int
    type: int
    chance: int = 0
    next_step: int = 0


def continued(
    new_blocks: int, length: int, turn: int, gap_s: float, pace_s: float, text_tokens: int | None, type_number: int = 0
) -> Features:
    """Return the features of a chain that continues another one.

    `gap_s`: since that was used; `pace_s`: such gaps, averaged over its turns; `text_tokens`: what the user added. The
    answer is not known yet, and never will be where no engine reports it.
    """
    return Features(
        1, bisect_right(_NEW_BLOCKS, new_blocks), bisect_right(_LENGTH, length), bisect_right(_TURNS, turn), AWAITED,
        1 + bisect_right(_GAP_S, gap_s), 1 + bisect_right(_GAP_S, pace_s),
        0 if text_tokens is None else 1 + bisect_right(_TEXT_TOKENS, text_tokens), type_number,
    )  # fmt: skip


def begun(
    new_blocks: int, length: int, text_tokens: int | None, type_number: int = 0, *, is_branch: bool = False
) -> Features:
    """Return the features of a chain that continues none; `is_branch`: it shares two blocks or more with others."""
    return Features(
        2 if is_branch else 0, bisect_right(_NEW_BLOCKS, new_blocks), bisect_right(_LENGTH, length), 0, AWAITED, 0, 0,
        0 if text_tokens is None else 1 + bisect_right(_TEXT_TOKENS, text_tokens), type_number,
    )  # fmt: skip


def grown(features: Features, new_blocks: int, length: int) -> Features:
    """The same request has gone on."""
    return features._replace(new_blocks=bisect_right(_NEW_BLOCKS, new_blocks), length=bisect_right(_LENGTH, length))


def with_answer(features: Features, output_tokens: int) -> Features:
    return Features(*features[:4], 1 + bisect_right(_ANSWER_TOKENS, output_tokens), *features[5:])  # often called


def with_hint(features: Features, hint: Expectation) -> Features:
    """What a hint leaves out stays as it was."""
    chance, next_step = features.chance, features.next_step
    if hint.will_continue is not None:
        chance = 1 + min(int(hint.will_continue * CHANCES), CHANCES - 1)
    if 0 < hint.next_step < NEXT_STEPS:
        next_step = hint.next_step
    return features._replace(chance=chance, next_step=next_step)


def coarse(features: Features) -> Features:
    """What nearly every cell of these would be taken for."""
    return features._replace(gap=0, pace=0, text=0, type=0)


def unhinted(features: Features) -> Features:
    return features._replace(chance=0, next_step=0)
