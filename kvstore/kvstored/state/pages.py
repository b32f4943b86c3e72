"""The check of a state file before LMDB opens it: its pages are walked without LMDB, which a damaged page might end."""

from __future__ import annotations

import stat
from pathlib import Path


class Unusable(Exception):
    """Raised when the file cannot be used; the message says why."""


def require_whole(path: Path) -> None:
    """Check all pages of the file `path` without LMDB. Raises Unusable for a file on which LMDB might end the process,
    OSError when it cannot be read."""
    from lmdb.verify import VerifyError, verify

    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise Unusable("it is not a regular file")
    try:
        problems = verify(str(path), subdir=False)  # type: ignore[no-untyped-call]
    except VerifyError as error:
        problems = [str(error)]
    except PermissionError:
        raise Unusable(f"it belongs to uid {status.st_uid}, and this user cannot read it") from None
    except OSError:
        raise
    except Exception as error:  # a walk over bytes that mean nothing raises nearly any
        problems = [f"{type(error).__name__}: {error}"]
    if problems:
        raise Unusable(f"damaged: {problems[0]}")
