"""The features of a chain when it is used, as small numbers: hazard tables are kept for classes of them.

Some come from the structure alone (lengths in blocks, turns, gaps), which every daemon sees; some from an engine's
report of a request (tokens of prompt and answer). An unknown feature is bucket 0; an awaited answer is AWAITED.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import NamedTuple, Protocol

_NEW_BLOCKS = (2, 5, 15)
_LENGTH = (3, 7, 15, 40)
_TURNS = (2, 3, 5, 9)
_ANSWER_TOKENS = (30, 100, 250, 500)
_GAP_S = tuple(1.5 * 1.6**step for step in range(11))
_TEXT_TOKENS = tuple(16 * 2**step for step in range(11))
AWAITED = -1  # may be known later: as long as it is not, the step above stands for it
CHANCES, NEXT_STEPS = 5, 4  # how many values a hint has


class HintFeatures(Protocol):
    """The parts of an engine's hint that become features: `will_continue` and `next_step`. None and 0 mean not
    given.
    """

    @property
    def will_continue(self) -> float | None: ...

    @property
    def next_step(self) -> int: ...


class Features(NamedTuple):
    """The features of one use of a chain, by which chains are divided into classes. Each is a small whole number.
    `kind` is 0 for a new chain, 1 for a chain that continues another, and 2 for a new chain that shares two blocks or
    more with others. `chance` and `next_step` are an engine's expectation; 0 means not given.
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


_made = tuple.__new__  # quicker than `Features()`: these are made at each request


def continued(
    new_blocks: int, length: int, turn: int, gap_s: float, pace_s: float, text_tokens: int | None, type_number: int = 0
) -> Features:
    """Return the features of a chain of `length` blocks that continues another chain by `new_blocks` blocks, at its use
    number `turn`. `gap_s`: the seconds since the other chain's use. `pace_s`: the mean of such gaps over the turns of
    the chain. `text_tokens`: the number of tokens that the user added. The length of the answer is not known yet, and
    never becomes known if no engine reports it.
    """
    return _made(Features, (
        1, bisect_right(_NEW_BLOCKS, new_blocks), bisect_right(_LENGTH, length), bisect_right(_TURNS, turn), AWAITED,
        1 + bisect_right(_GAP_S, gap_s), 1 + bisect_right(_GAP_S, pace_s),
        0 if text_tokens is None else 1 + bisect_right(_TEXT_TOKENS, text_tokens), type_number, 0, 0,
    ))  # fmt: skip


def begun(
    new_blocks: int, length: int, text_tokens: int | None, type_number: int = 0, *, is_branch: bool = False
) -> Features:
    """Return the features of a chain of `length` blocks that continues no other chain, of which `new_blocks` are new.
    `text_tokens` is the number of tokens of its prompt, or None. `is_branch` says that the chain shares two blocks or
    more with others.
    """
    return _made(Features, (
        2 if is_branch else 0, bisect_right(_NEW_BLOCKS, new_blocks), bisect_right(_LENGTH, length), 0, AWAITED, 0, 0,
        0 if text_tokens is None else 1 + bisect_right(_TEXT_TOKENS, text_tokens), type_number, 0, 0,
    ))  # fmt: skip


def grown(features: Features, new_blocks: int, length: int) -> Features:
    """Return a copy of `features` for the same chain at a new length: it has `length` blocks, of which `new_blocks` are
    new.
    """
    kind, _, _, *others = features
    return Features(kind, bisect_right(_NEW_BLOCKS, new_blocks), bisect_right(_LENGTH, length), *others)


def with_answer(features: Features, output_tokens: int) -> Features:
    kind, new_blocks, length, turn, _, *others = features
    return _made(Features, (kind, new_blocks, length, turn, 1 + bisect_right(_ANSWER_TOKENS, output_tokens), *others))


def with_hint(features: Features, hint: HintFeatures) -> Features:
    """Return a copy of `features` with the engine's expectation in `hint`. Features that the hint does not give stay
    unchanged.
    """
    chance, next_step = features.chance, features.next_step
    if hint.will_continue is not None:
        chance = 1 + min(int(hint.will_continue * CHANCES), CHANCES - 1)
    if 0 < hint.next_step < NEXT_STEPS:
        next_step = hint.next_step
    return features._replace(chance=chance, next_step=next_step)


def coarse(features: Features) -> Features:
    """Return a copy of `features` in which gap, pace, text and type are unknown, for a coarser class of chains."""
    return Features(*features[:5], 0, 0, 0, 0, *features[9:])  # often called, as `grown` is


def unhinted(features: Features) -> Features:
    return features._replace(chance=0, next_step=0)


def taking(names: Sequence[str]) -> Callable[[Features], tuple[int, ...]]:
    """Return a function that returns the features with these `names` of a chain's features, in their order."""
    places = tuple(map(Features._fields.index, names))
    if len(places) > 1:
        return itemgetter(*places)
    return lambda features: tuple([features[at] for at in places])
