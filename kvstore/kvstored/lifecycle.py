"""The life of a copy of a block as one table, and the closed list of causes why a block is missing.

A block has at most one copy in each tier. Each action of the daemon on a copy is a `Step`; `advance(state, step)` is
the only way from one `CopyState` to the next, and a step that the table does not hold is a broken invariant and
crashes.

The table ends where the copy leaves the index. Its slot may be in use for longer: in limbo, which the leases account
for, or in quarantine, which the tier accounts for.

Other modules decide which copy moves (policies), when (movement), and further conditions (residency: leaf-first).
"""

from __future__ import annotations

from enum import IntEnum, auto


class CopyState(IntEnum):
    ABSENT = 0
    FILLING = 1  # the slot is allocated and being written; not readable
    RESIDENT = 2  # readable


class Step(IntEnum):
    RESERVE = auto()  # a slot was allocated for a put, a promotion or a demotion
    PUBLISH = auto()  # its bytes are whole
    ABORT = auto()  # they will never be
    RECOVER = auto()  # it comes whole: found on the medium at start, or stored in one step
    RETIRE = auto()  # the copy is gone: demoted, evicted, expired, dropped, invalidated or damaged


TRANSITIONS: dict[tuple[CopyState, Step], CopyState] = {
    (CopyState.ABSENT, Step.RESERVE): CopyState.FILLING,
    (CopyState.ABSENT, Step.RECOVER): CopyState.RESIDENT,
    (CopyState.FILLING, Step.PUBLISH): CopyState.RESIDENT,
    (CopyState.FILLING, Step.ABORT): CopyState.ABSENT,
    (CopyState.RESIDENT, Step.RETIRE): CopyState.ABSENT,
}

_STEP_BITS = 3
_NEXT: tuple[CopyState | None, ...] = tuple(
    TRANSITIONS.get((state, Step(step))) if 0 < step <= len(Step) else None
    for state in CopyState
    for step in range(2**_STEP_BITS)
)


def advance(state: int, step: Step) -> CopyState:
    """Return the state that a block's copy has after `step`, if it was in `state`. Raises RuntimeError if that step is
    not possible in `state`."""
    after = _NEXT[state << _STEP_BITS | step]
    if after is None:
        raise RuntimeError(f"illegal transition of a block copy: {step.name} while {CopyState(state).name}")
    return after


class Cause(IntEnum):
    """The reason why a block is not stored or cannot be read. The numbers equal the wire's MissReason. 11 to 13 mean
    that its put was refused; 11 and 12 of a stored block, that it could not be brought to DRAM.
    """

    NEVER_STORED = 1
    EVICTED = 2
    EXPIRED = 3
    QUOTA = 4
    OTHER_FINGERPRINT = 5
    CORRUPT = 6
    INVALIDATED = 7
    DROPPED = 8
    READ_FAILED = 9
    FORGOTTEN = 10
    NO_ROOM = 11
    OVER_QUOTA = 12
    DECLINED = 13
    LOSSY_ONLY = 14


# Causes that obey leaf-first and leases: the daemon chose the block, so it must choose one that leaves no
# hole. A block that EXPIRED is removed at its time, even if other blocks need it.
BY_CHOICE = frozenset({Cause.EVICTED, Cause.QUOTA})

# Causes by which an owner or an operator took a block away: nothing that names it is to outlive the daemon.
BY_ORDER = frozenset({Cause.INVALIDATED, Cause.DROPPED})
