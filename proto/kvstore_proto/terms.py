"""Terms: how long blocks are to be kept, as a put or a touch asks for it, and the bounds of that."""

from __future__ import annotations

from typing import Final, NamedTuple

TTL_MAX_S: Final = 10 * 365 * 24 * 3600
PRIORITY_MIN: Final = -8
PRIORITY_MAX: Final = 7
OWNER_MAX_CHARS: Final = 64


class Terms(NamedTuple):
    """What is asked for some blocks; None and "" leave a term as it is. `ttl_s`: seconds from now on, 0: for ever.
    `priority`: a lower one leaves a full tier first. `pin` and `unpin` name the owner of a pin, which a block has once
    or not at all."""

    ttl_s: int | None = None
    priority: int | None = None
    pin: str = ""
    unpin: str = ""

    def mistake(self) -> str:
        """Return what is wrong with them and what to do; "" where nothing is."""
        if self.ttl_s is not None and not 0 <= self.ttl_s <= TTL_MAX_S:
            return f"ttl must be from 1 to {TTL_MAX_S} seconds, or 0 for no expiry, got {self.ttl_s}"
        if self.priority is not None and not PRIORITY_MIN <= self.priority <= PRIORITY_MAX:
            return f"priority must be from {PRIORITY_MIN} to {PRIORITY_MAX}, got {self.priority}"
        for what, owner in (("pin", self.pin), ("unpin", self.unpin)):
            if len(owner) > OWNER_MAX_CHARS or not owner.isprintable():
                return f"{what} must name an owner in up to {OWNER_MAX_CHARS} printable characters, got {owner!r:.80}"
        return ""


NO_TERMS: Final = Terms()

_PRIORITY_SHIFT = 32  # in a word that is kept beside a block


def kept_word(expires_s: int, priority: int) -> int:
    """Return the word of a slot's header and a record for a block that expires at `expires_s`, seconds since the epoch
    (0: never), and its priority. 0 for a block of which nothing is said."""
    return (priority & 0xFF) << _PRIORITY_SHIFT | expires_s
