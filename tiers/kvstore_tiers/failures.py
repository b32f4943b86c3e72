"""When failures of a medium count against it: used by a tier for its own transfers, by the daemon for those it
requests.

Owns the figures and decides nothing.
"""

from __future__ import annotations

import errno

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # the medium works and is full
# Nothing can be written, for now or to this user; what is there may be read all the same.
CANNOT_WRITE = NO_ROOM | {errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM}
ERRORS_IN_A_ROW = 8  # failed reads or writes in a row after which the medium is at fault, not the block
