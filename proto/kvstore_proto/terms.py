"""Terms say how long blocks are kept: a put or a touch asks for them. The module has the terms and their bounds."""

from __future__ import annotations

from typing import Final, NamedTuple

TTL_MAX_S: Final = 10 * 365 * 24 * 3600
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7
OWNER_MAX_CHARS: Final = 64


class Terms(NamedTuple):
    """Terms on which blocks are kept, in a put or a touch. A field that is None or "" leaves its term unchanged.
    `ttl_s` is the number of seconds until the blocks expire, 0 for never. Blocks of a lower `priority` are evicted from
    a full tier first. `pin` is the name of an owner for whom the blocks are not evicted, and `unpin` ends the pin of
    that owner. A block has at most one pin of each owner. All pins of `pin` end `pin_ttl_s` seconds from now, 0: never.
    """

    ttl_s: int | None = None
    priority: int | None = None
    pin: str = ""
    unpin: str = ""
    pin_ttl_s: int | None = None

    def mistake(self) -> str:
        """Return one line that says which term is out of bounds and what is allowed, or "" when all terms are right."""
        if self.ttl_s is not None and not 0 <= self.ttl_s <= TTL_MAX_S:
            return f"ttl must be from 1 to {TTL_MAX_S} seconds, or 0 for no expiry, got {self.ttl_s}"
        if self.priority is not None and not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            return f"priority must be from {PRIORITY_MIN} to {PRIORITY_MAX}, got {self.priority}"
        if self.pin_ttl_s is not None and not (self.pin and 0 <= self.pin_ttl_s <= TTL_MAX_S):
            return f"pin_ttl goes with pin: from 1 to {TTL_MAX_S} seconds, or 0 for no end, got {self.pin_ttl_s}"
        for what, owner in (("pin", self.pin), ("unpin", self.unpin)):
            if len(owner) > OWNER_MAX_CHARS or not owner.isprintable():
                return f"{what} must name an owner in up to {OWNER_MAX_CHARS} printable characters, got {owner!r:.80}"
        return ""


NO_TERMS: Final = Terms()

_PRIORITY_SHIFT = 32  # in a word that is kept beside a block


def kept_word(expires_s: int, priority: int) -> int:
    """Return the number that a block's header and record keep for its expiry and its priority. The block expires at
    `expires_s`, in seconds since the epoch (0 means never). A block with priority 0 that never expires has the number
    0.
    """
    return (priority & 0xFF) << _PRIORITY_SHIFT | expires_s
