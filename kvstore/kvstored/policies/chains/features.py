"""What is known of a chain when it is used, as small numbers: the classes that hazard tables are kept for.

Some come from the structure alone (lengths in blocks, turns, gaps), which every daemon sees; some from what an engine
tells of a request (tokens of prompt and answer). What is not known is bucket 0 of its own.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

_NEW_BLOCKS = (2, 5, 15)
_LENGTH = (3, 7, 15, 40)
_TURNS = (2, 3, 5, 9)
_ANSWER_TOKENS = (30, 100, 250, 500)
_GAP_S = tuple(1.5 * 1.6**step for step in range(11))
_TEXT_TOKENS = tuple(16 * 2**step for step in range(11))
AWAITED = -1  # will be known later


class Features(NamedTuple):
    """Of one use of a chain. `kind`: 0 new, 1 continued, 2 new but for two blocks or more of others."""

    kind: int
    new_blocks: int
    length: int
    turn: int
    answer: int
    gap: int
    text: int
    hint: int
    type: int


def features_of(
    *,
    is_continued: bool,
    new_blocks: int,
    length: int,
    turn: int,
    gap_s: float,
    text_tokens: int | None,
    type_number: int,
    is_answer_awaited: bool = False,
    is_branch: bool = False,
) -> Features:
    """`gap_s`: since the chain was used before; `text_tokens`: what the user added; the answer is not known yet."""
    return Features(
        1 if is_continued else 2 if is_branch else 0,
        bisect_right(_NEW_BLOCKS, new_blocks),
        bisect_right(_LENGTH, length),
        bisect_right(_TURNS, turn),
        AWAITED if is_answer_awaited else 0,
        1 + bisect_right(_GAP_S, gap_s) if is_continued else 0,
        0 if text_tokens is None else 1 + bisect_right(_TEXT_TOKENS, text_tokens),
        AWAITED if is_answer_awaited else 0,
        type_number,
    )


def with_answer(features: Features, output_tokens: int, hint: int = 0) -> Features:
    return features._replace(answer=1 + bisect_right(_ANSWER_TOKENS, output_tokens), hint=hint)
