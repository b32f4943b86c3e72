"""Checks of the seconds, counts and names that a caller gives, made once, at the API's entry.

Each function returns the value in the client's internal form, or raises KVStoreError(INVALID) whose line names the
argument. Code behind it does not check again, and nothing is sent before the check.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from numbers import Real
from typing import Any, Final, TypedDict

from kvstore_client.errors import invalid
from kvstore_proto.terms import OWNER_MAX_CHARS, PRIORITY_MAX, PRIORITY_MIN, TTL_MAX_S, Terms

LONGEST_S: Final = 24 * 3600.0  # a longer wait is as good as for ever; what carries it counts milliseconds in 32 bits
UINT32_MAX: Final = (1 << 32) - 1
UINT64_MAX: Final = (1 << 64) - 1


def seconds(name: str, value: Any) -> float:
    """Check that `value`, the caller's argument `name`, is a duration in seconds, and return it from 0 to one day. A
    negative duration becomes 0, and one over a day, or `inf`, becomes a day. Raises KVStoreError(INVALID) otherwise.
    """
    if type(value) is float and 0.0 <= value <= LONGEST_S:  # of nearly every call; to ask an abstract class takes 2 us
        return value
    if not _is_number(value) or value != value:
        raise invalid(f"{name} must be a number of seconds, got {shown(value)}")
    return float(max(0.0, min(value, LONGEST_S)))


def positive_seconds(name: str, value: Any) -> float:
    """Check that `value`, the caller's argument `name`, is more than 0 seconds, and return it, at most one day. Raises
    KVStoreError(INVALID) otherwise.
    """
    given = seconds(name, value)
    if not given:
        raise invalid(f"{name} must be more than 0 seconds, got {value!r}")
    return given


def count(name: str, value: Any, *, least: int = 0, most: int | None = None) -> int:
    """Check that `value`, the caller's argument `name`, is a whole number from `least` to `most`, and return it.
    Without `most` there is no upper bound. Raises KVStoreError(INVALID) otherwise.
    """
    try:
        given = operator.index(value)
    except Exception:  # of the value's own making, too
        given = least - 1
    if isinstance(value, bool) or given < least or (most is not None and given > most):
        bounds = f"from {least} on" if most is None else f"from {least} to {most}"
        raise invalid(f"{name} must be a whole number {bounds}, got {shown(value)}")
    return given


def number_between(name: str, value: Any, least: float, most: float) -> float:
    """Check that `value`, the caller's argument `name`, is a number from `least` to `most`, and return it as a float.
    Raises KVStoreError(INVALID) otherwise.
    """
    if not _is_number(value) or not least <= value <= most:
        raise invalid(f"{name} must be from {least:g} to {most:g}, got {shown(value)}")
    return float(value)


def one_of(name: str, value: Any, known: Collection[str]) -> str:
    """Return `value`, the caller's argument `name`, if it is one of the words in `known`. Raises KVStoreError(INVALID)
    otherwise.
    """
    if not isinstance(value, str) or value not in known:
        raise invalid(f"{name} {shown(value)} is unknown; known: {', '.join(known)}")
    return value


def truth(name: str, value: Any) -> bool:
    """Return `value`, which must be True or False."""
    if not isinstance(value, bool):
        raise invalid(f"{name} must be True or False, got {shown(value)}")
    return value


def text(name: str, value: Any, most_bytes: int) -> str:
    """Return `value`, the caller's argument `name`, if it is text of at most `most_bytes` bytes in UTF-8. Raises
    KVStoreError(INVALID) otherwise.
    """
    try:
        is_fit = isinstance(value, str) and len(value.encode()) <= most_bytes
    except UnicodeEncodeError:
        is_fit = False
    if not is_fit:
        raise invalid(f"{name} must be text of at most {most_bytes} bytes in UTF-8, got {shown(value)}")
    return str(value)


class PutTerms(TypedDict, total=False):
    """Terms on which stored blocks are kept: how long, how firmly and for whom. A new block gets the tenant's default
    for a term that is not given; a block that is stored already keeps the term that it has.

    `ttl`: seconds until the blocks expire, rounded down to whole ones; 0: never. An expired block is not found any more
    and is removed, pinned or not. `priority`, from -8 to 7: in a full tier blocks of lower priority are evicted first;
    most blocks have 0. `pin`: a name of your choice; the blocks are not evicted until they are touched with `unpin` of
    the same name, or all pins of that name end: `pin_ttl` seconds after the last call that gave one, 0: never.
    """

    ttl: float | None
    priority: int | None
    pin: str
    unpin: str
    pin_ttl: float | None


def terms(ttl: Any = None, priority: Any = None, pin: Any = "", unpin: Any = "", pin_ttl: Any = None) -> Terms:
    """Check a caller's terms for blocks, and return them in the form in which they are sent. `ttl` and `pin_ttl` are 0
    or 1 and more seconds, `priority` is from -8 to 7, and `pin` and `unpin` are names. Raises KVStoreError(INVALID) for
    another value.
    """
    for name, given_s in (("ttl", ttl), ("pin_ttl", pin_ttl)):
        if given_s is not None and (not _is_number(given_s) or not (given_s == 0 or 1 <= given_s <= TTL_MAX_S)):
            raise invalid(f"{name} must be from 1 to {TTL_MAX_S} seconds, or 0 for no expiry, got {shown(given_s)}")
    if priority is not None:
        priority = count("priority", priority, least=PRIORITY_MIN, most=PRIORITY_MAX)
    for name, owner in (("pin", pin), ("unpin", unpin)):
        text(name, owner, OWNER_MAX_CHARS * 4)
    whole = [None if given_s is None else int(given_s) for given_s in (ttl, pin_ttl)]
    asked = Terms(whole[0], priority, pin, unpin, whole[1])
    if mistake := asked.mistake():
        raise invalid(mistake)
    return asked


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: Any) -> str:
    """Return `value` as Python writes it, on one line of at most 80 characters, for an error message."""
    try:
        written = " ".join(repr(value).split())
    except Exception:  # of the value's own making
        written = f"a {type(value).__name__}"
    return written if len(written) <= 80 else f"{written[:77]}..."
