"""The drivers, by the scheme of the tier's URL. A driver's library is imported when a tier opens it, not before.

A new driver costs its file and its entries in `DRIVERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final, cast
from urllib.parse import urlsplit

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
    """`threads` call it at once. `credentials` by the names that the driver's file lists. The store need not be
    reachable. Raises ValueError for a URL that no driver understands, ModuleNotFoundError (with what to install) where
    its library is missing."""
    scheme = urlsplit(url).scheme
    if scheme not in DRIVERS:
        raise ValueError(f"no driver for {scheme or url!r}: begin the URL with one of {', '.join(DRIVERS)}://")
    try:
        module = import_module(f"{__name__}.{DRIVERS[scheme]}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a tier at {scheme}:// needs {error.name}: pip install 'kvstored[{EXTRA}]'", name=error.name
        ) from None
    opened = module.open_driver(url, timeout_s=timeout_s, threads=threads, credentials=credentials)
    return cast(Driver, opened)
