"""Advises what to install where a package's library lacks one of the system's, by the text of the loader's error."""

from __future__ import annotations

import re

_MISSING = re.compile(r"(?P<file>(?P<stem>lib[\w.+-]*?)\.so(?:\.(?P<version>\d+))?[\d.]*): cannot open shared object")
_CUDA = ("libcuda", "libcudart", "libcublas", "libnvrtc", "libcufile")


def advice(error: str) -> str:
    """Return the loader's `error` with what to install, where it names a library that is missing."""
    missing = _MISSING.search(error)
    if missing is None:
        return error
    stem, version = missing["stem"], missing["version"] or ""
    if stem in _CUDA:
        return f"{error}: this wheel is for CUDA, pip install mooncake-transfer-engine-non-cuda in its place"
    package = stem.lower().replace("_", "-") + ("-" if version and stem[-1].isdigit() else "") + version
    return f"{error}: apt-get install {package}, or the package of your system that has {missing['file']}"
