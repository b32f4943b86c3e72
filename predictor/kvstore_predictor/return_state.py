"""What session-return has learned, as arrays that a later process can go on from.

Not kept: requests whose answer is awaited. Never does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np

from kvstore_predictor.base import Array, Piece, State
from kvstore_predictor.features import Features, unhinted
from kvstore_predictor.gittins import BINS
from kvstore_predictor.hazards import STEP, ladders_of
from kvstore_predictor.pieces import parts
from kvstore_predictor.return_hazards import ReturnHazards, hint_number
from kvstore_predictor.sessions import Sessions

FORMAT = 2
_COPIED = 128  # chains or marks copied between two pauses
_LOOKED_AT = 4096  # slots looked at between two pauses
_COLUMNS = ("tenant", "tokens", "answer", "length", "turn", "bin", "used_s", "pace", "due_s", "fan")
CHAIN = np.dtype(
    [
        ("last", "V16"), ("above", "V16"), ("has_above", "?"), ("features", "i1", (len(Features._fields),)),
        ("tenant", "i8"), ("tokens", "i8"), ("answer", "i8"), ("length", "i4"), ("turn", "i4"), ("bin", "i4"),
        ("used_s", "f8"), ("pace", "f8"), ("due_s", "f8"), ("fan", "u1"),
    ]
)  # fmt: skip
MARK = np.dtype([("tenant", "i8"), ("key", "V16"), ("is_shared", "?")])
_NO_KEY = bytes(16)


def numbers(state: State, count: int) -> list[float]:
    """Raises ValueError where there are not so many."""
    found = state.get("numbers")
    if found is None or found.shape != (count,):
        raise ValueError("the state of another version")
    return [float(value) for value in found]


def exported(sessions: Sessions, features: Sequence[Features | None], tables: ReturnHazards) -> Iterator[Piece]:
    """Chains come in the order of their last use."""
    about = json.dumps({"format": FORMAT, "orders": tables.orders}).encode()
    yield "about", np.frombuffer(about, np.uint8)
    hand, live = sessions.hand, np.frombuffer(sessions.live, np.uint8)
    for first in range(0, sessions.slots, _LOOKED_AT):
        yield "chains", np.empty(0, CHAIN)
        slots = np.arange(hand + first, hand + min(first + _LOOKED_AT, sessions.slots)) % sessions.slots
        awaited = slots[live[slots] == 1].tolist()
        for begin in range(0, len(awaited), _COPIED):
            part = [slot for slot in awaited[begin : begin + _COPIED] if sessions.live[slot]]
            yield "chains", _chains(sessions, features, part)
    for marks in parts(sessions.marks(), MARK, _COPIED):
        yield "marks", marks
    yield from tables.copied()


def _chains(sessions: Sessions, features: Sequence[Features | None], slots: Sequence[int]) -> Array:
    chains = np.zeros(len(slots), CHAIN)
    above = [sessions.above[slot] for slot in slots]
    chains["last"] = np.frombuffer(b"".join(sessions.last[slot] or _NO_KEY for slot in slots), "V16")
    chains["above"] = np.frombuffer(b"".join(key or _NO_KEY for key in above), "V16")
    chains["has_above"] = [key is not None for key in above]
    chains["features"] = [features[slot] for slot in slots]
    for name in _COLUMNS:
        column = getattr(sessions, name)
        chains[name] = [column[slot] for slot in slots]
    return chains


def restored(state: State, slots: int, later_s: float) -> tuple[Sessions, list[Features | None], ReturnHazards]:
    """With room for `slots` chains, the last ones. Raises ValueError for a state that this version cannot use."""
    try:
        about, steps = json.loads(state["about"].tobytes()), state.get("steps", np.empty(0, STEP))
        chains = state.get("chains", np.empty(0, CHAIN))[-slots:]
        marks = state.get("marks", np.empty(0, MARK))
        if about["format"] != FORMAT or (steps.dtype, chains.dtype, marks.dtype) != (STEP, CHAIN, MARK):
            raise ValueError("the state of another version")
        tables = ReturnHazards(ladders_of(about["orders"], steps))
        tables.restore(state)
        known = [Features(*each) for each in chains["features"].tolist()]
        sessions = Sessions(slots)
        _restore_chains(sessions, chains, known, tables, later_s)
        sessions.restore_marks(marks.tolist())
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
        raise ValueError(f"the state of another version: {error}") from error
    features: list[Features | None] = [*known, *[None] * (slots - len(known))]
    return sessions, features, tables


def _restore_chains(
    sessions: Sessions, chains: Array, features: Sequence[Features], tables: ReturnHazards, later_s: float
) -> None:
    for name in _COLUMNS:
        column = getattr(sessions, name)
        for slot, value in enumerate(chains[name].tolist()):
            column[slot] = value
    lasts, aboves = chains["last"].tolist(), chains["above"].tolist()
    for slot, (last, above, has_above) in enumerate(zip(lasts, aboves, chains["has_above"].tolist(), strict=True)):
        sessions.name(slot, sessions.tenant[slot], last, above if has_above else None, sessions.fan[slot])
        sessions.cell[slot], sessions.hint[slot] = tables.cell(unhinted(features[slot])), hint_number(features[slot])
        sessions.used_s[slot] += later_s
        sessions.due_s[slot] += later_s if sessions.due_s[slot] else 0.0
        sessions.bin[slot] = min(max(sessions.bin[slot], 0), BINS)
    sessions.hand = len(chains) % sessions.slots
