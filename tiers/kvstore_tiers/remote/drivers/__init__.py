"""The drivers, by the scheme of the tier's URL. A driver's library is imported only when a tier opens it.

A new driver needs its file and its entries in `DRIVERS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast
from urllib.parse import urlsplit

from kvstore_proto.version import pip_install
from kvstore_tiers.remote.driver import Driver

DRIVERS: Final[Mapping[str, str]] = {
    "redis": "redis",  # redis://HOST:PORT/DB
    "rediss": "redis",  # the same over TLS
    "unix": "redis",  # unix:///PATH?db=N
    "mooncake": "mooncake",  # mooncake://MASTER:PORT
    "s3": "object_store",  # s3://BUCKET/PREFIX, and the other schemes of object stores
    "gs": "object_store",
    "az": "object_store",
    "file": "object_store",
}  # scheme -> module of this package, which has `open_driver`

EXTRA = "remote"


def open_driver(url: str, *, timeout_s: float, threads: int, credentials: Mapping[str, str]) -> Driver:
    """Return a driver for the remote store at `url`, whose store need not be reachable yet. At most `threads` threads
    will call it, and a call may take `timeout_s` seconds. The driver's file lists the names of `credentials`. Raises
    ValueError for an unknown URL, ModuleNotFoundError (with the package to install) if a library is missing.
    """
    scheme = urlsplit(url).scheme
    if scheme not in DRIVERS:
        raise ValueError(f"no driver for {scheme or url!r}: begin the URL with one of {', '.join(DRIVERS)}://")
    try:
        module = import_module(f"{__name__}.{DRIVERS[scheme]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a tier at {scheme}:// needs {error.name}: {pip_install(EXTRA)}", name=error.name
        ) from None
    opened = module.open_driver(url, timeout_s=timeout_s, threads=threads, credentials=credentials)
    return cast(Driver, opened)


_MISSING = re.compile(r"(?P<file>(?P<stem>lib[\w.+-]*?)\.so(?:\.(?P<version>\d+))?[\d.]*): cannot open shared object")
_CUDA = ("libcuda", "libcudart", "libcublas", "libnvrtc", "libcufile")


def advice(error: str) -> str:
    """Return the text `error` of a failed import. If it names a missing shared library, the package to install is
    added.
    """
    missing = _MISSING.search(error)
    if missing is None:
        return error
    stem, version = missing["stem"], missing["version"] or ""
    if stem in _CUDA:
        return f"{error}: this wheel is for CUDA, pip install mooncake-transfer-engine-non-cuda in its place"
    package = stem.lower().replace("_", "-") + ("-" if version and stem[-1].isdigit() else "") + version
    return f"{error}: apt-get install {package}, or the package of your system that has {missing['file']}"
