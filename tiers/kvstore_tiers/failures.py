"""What failures of a medium mean, for all who judge them: a tier its own transfers, the daemon those it asked for.

Owns the figures and decides nothing.
"""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the medium works and is full
ERRORS_IN_A_ROW = 8  # reads or writes that fail one after another: it is the medium, not the block
