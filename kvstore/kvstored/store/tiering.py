"""Which tier of a residency index is which."""

from __future__ import annotations

MAPPED = 0  # the position of the tier whose arenas clients map: the first, fastest one
