"""Where a block is in a tier."""

from __future__ import annotations

from typing import NamedTuple


class Slot(NamedTuple):
    """A place for one block. `nbytes` includes header and padding; `generation` grows each time a place is reused."""

    container: int  # arena or slab number
    offset: int
    nbytes: int
    generation: int
