"""The life of a copy of a block as one table, and the closed lists of why a block moves and why it is
missing.

A block has at most one copy in each tier. What the daemon may do to a copy is a `Step`; `advance(state,
step)` is the only way from one `CopyState` to the next, and a step that the table does not hold is a broken
invariant and crashes.

The index (residency) holds copies that are FILLING, RESIDENT or DRAINING. LIMBO and QUARANTINED are the
afterlife of a slot: the block no longer has the copy, but the bytes are not free yet; the data plane and the
tier account for them.

Never here: which copy should move (policies), when (movement), or what else must hold (residency:
leaf-first).
"""

from __future__ import annotations

from enum import IntEnum, auto

from kvstore_proto.v1 import kvstore_pb2 as pb


class CopyState(IntEnum):
    ABSENT = 0
    FILLING = 1  # the slot is allocated and being written; nobody may read it
    RESIDENT = 2  # readable
    DRAINING = 3  # readable, while it is copied to the tier below
    LIMBO = 4  # out of the index; a late reader may still look at the bytes
    QUARANTINED = 5  # out of the index; failed verification, kept for inspection


class Step(IntEnum):
    RESERVE = auto()  # a slot was allocated for a put, a promotion or a demotion
    PUBLISH = auto()  # its bytes are whole
    ABORT = auto()  # they will never be
    RECOVER = auto()  # found whole on the medium at start
    DRAIN = auto()  # a demotion has begun
    KEEP = auto()  # ... and was given up
    RETIRE = auto()  # the copy is gone: demoted, evicted, expired, dropped or invalidated
    LINGER = auto()  # the same, but a reader of an ended lease may still look
    LET_GO = auto()  # that reader is gone
    QUARANTINE = auto()  # verification failed
    DISCARD = auto()  # the quarantined slot was freed


TRANSITIONS: dict[tuple[CopyState, Step], CopyState] = {
    (CopyState.ABSENT, Step.RESERVE): CopyState.FILLING,
    (CopyState.ABSENT, Step.RECOVER): CopyState.RESIDENT,
    (CopyState.FILLING, Step.PUBLISH): CopyState.RESIDENT,
    (CopyState.FILLING, Step.ABORT): CopyState.ABSENT,
    (CopyState.RESIDENT, Step.DRAIN): CopyState.DRAINING,
    (CopyState.RESIDENT, Step.RETIRE): CopyState.ABSENT,
    (CopyState.RESIDENT, Step.LINGER): CopyState.LIMBO,
    (CopyState.RESIDENT, Step.QUARANTINE): CopyState.QUARANTINED,
    (CopyState.DRAINING, Step.KEEP): CopyState.RESIDENT,
    (CopyState.DRAINING, Step.RETIRE): CopyState.ABSENT,
    (CopyState.DRAINING, Step.LINGER): CopyState.LIMBO,
    (CopyState.DRAINING, Step.QUARANTINE): CopyState.QUARANTINED,
    (CopyState.LIMBO, Step.LET_GO): CopyState.ABSENT,
    (CopyState.QUARANTINED, Step.DISCARD): CopyState.ABSENT,
}

INDEXED = frozenset({CopyState.FILLING, CopyState.RESIDENT, CopyState.DRAINING})
READABLE = frozenset({CopyState.RESIDENT, CopyState.DRAINING})


_STEP_BITS = 4
_NEXT: tuple[CopyState | None, ...] = tuple(
    TRANSITIONS.get((state, Step(step))) if 0 < step <= len(Step) else None
    for state in CopyState
    for step in range(1 << _STEP_BITS)
)


def advance(state: int, step: Step) -> CopyState:
    """The state after `step`. Raises RuntimeError when the table has no such transition."""
    after = _NEXT[state << _STEP_BITS | step]
    if after is None:
        raise RuntimeError(f"illegal transition of a block copy: {step.name} while {CopyState(state).name}")
    return after


class Move(IntEnum):
    """The only ways in which a block changes place by itself, and the two by which an operator takes it away."""

    PROMOTE = auto()  # gains a copy in a faster tier, keeps the slower one
    DEMOTE = auto()  # gains a copy in a slower tier, loses the faster one
    EVICT = auto()  # loses a copy for want of room
    EXPIRE = auto()  # loses a copy because its time to live is over
    QUARANTINE = auto()  # loses a copy that failed verification
    DROP = auto()  # an operator's `kvctl drop`
    INVALIDATE = auto()  # an operator ended a fingerprint


# What a move does to the copy it takes from and to the copy it makes.
STEPS: dict[Move, tuple[tuple[Step, ...], tuple[Step, ...]]] = {
    Move.PROMOTE: ((), (Step.RESERVE, Step.PUBLISH)),
    Move.DEMOTE: ((Step.DRAIN, Step.RETIRE), (Step.RESERVE, Step.PUBLISH)),
    Move.EVICT: ((Step.RETIRE,), ()),
    Move.EXPIRE: ((Step.RETIRE,), ()),
    Move.QUARANTINE: ((Step.QUARANTINE, Step.DISCARD), ()),
    Move.DROP: ((Step.RETIRE,), ()),
    Move.INVALIDATE: ((Step.RETIRE,), ()),
}


class Cause(IntEnum):
    """Why a block is not served. The numbers are the wire's MissReason."""

    NEVER_STORED = 1
    EVICTED = 2
    EXPIRED = 3
    QUOTA = 4
    OTHER_FINGERPRINT = 5
    CORRUPT = 6
    INVALIDATED = 7
    DROPPED = 8
    READ_FAILED = 9


# Causes that obey leaf-first and leases: the daemon chose the block, so it must choose one that leaves no
# hole.
BY_CHOICE = frozenset({Cause.EVICTED, Cause.EXPIRED, Cause.QUOTA})

CAUSE_OF_LOSS: dict[Move, Cause] = {
    Move.EVICT: Cause.EVICTED,
    Move.EXPIRE: Cause.EXPIRED,
    Move.QUARANTINE: Cause.CORRUPT,
    Move.DROP: Cause.DROPPED,
    Move.INVALIDATE: Cause.INVALIDATED,
}


def miss_reason(cause: Cause) -> pb.MissReason.ValueType:
    """The wire's name of a cause."""
    return pb.MissReason.ValueType(cause)
