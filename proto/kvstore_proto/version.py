"""The version of kvstored, one for all its packages, and how to install an extra. setup.py writes the version from the
tag or the commit."""

from __future__ import annotations

import sys

try:
    from kvstore_proto._version import VERSION
except ImportError:  # run from sources that were never installed
    VERSION = "0+unknown"

__all__ = ["VERSION", "pip_install"]
_DEBIAN_PACKAGE = "/usr/lib/kvstored"  # the environment that it brings


def pip_install(extra: str = "") -> str:
    """Return the words that tell a user how to install kvstored with `extra`, such as "gpu" or "engine,torch". No
    package index has kvstored.
    """
    if extra and sys.prefix == _DEBIAN_PACKAGE:
        return f"the Debian package has no extra {extra}: install the wheel with [{extra}] in its place"
    if not extra:
        return "pip install . in the clone, or the wheel's file"
    return f"pip install '.[{extra}]' in the clone, or the wheel's file name with [{extra}]"
