"""The version of kvstored, one for all its packages. setup.py writes it from the tag or the commit."""

from __future__ import annotations

try:
    from kvstore_proto._version import VERSION
except ImportError:  # run from sources that were never installed
    VERSION = "0+unknown"

__all__ = ["VERSION"]
