"""Where a Mooncake Store is: the URL of a tier.

    mooncake://MASTER:PORT

`?` adds `protocol=tcp|rdma`, `device=NAME,NAME` (the RDMA devices), `metadata=URL` (of a metadata server; by default
nodes ask each other), `segment=SIZE` (memory that this node lends to the store; none by default) and `local=HOST`
(where other nodes reach this one; by default the address from which it reaches the master).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kvstore_console.units import parse_size

DEFAULT_PORT = 50051
QUERY: Final = frozenset({"protocol", "device", "metadata", "segment", "local"})


@dataclass(frozen=True)
class Place:
    """Where a store is, and what this node gives to it."""

    host: str
    port: int
    protocol: str = "tcp"
    devices: str = ""
    metadata: str = "P2PHANDSHAKE"
    segment_bytes: int = 0
    local: str = ""

    @property
    def master(self) -> str:
        return f"{self.host}:{self.port}"


def place_of(url: str) -> Place:
    """Raises ValueError for a URL that is not understood."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    if unknown := set(query) - QUERY:
        raise ValueError(f"mooncake:// takes no {min(unknown)!r}: the names are {', '.join(sorted(QUERY))}")
    if not parts.hostname or parts.path.strip("/"):
        raise ValueError(f"{url!r} is not mooncake://MASTER:PORT")
    protocol = query.get("protocol", "tcp")
    if protocol not in ("tcp", "rdma"):
        raise ValueError(f"protocol={protocol}: it is tcp or rdma")
    if protocol == "rdma" and not query.get("device"):
        raise ValueError("protocol=rdma needs device=NAME, such as device=mlx5_0")
    return Place(
        host=parts.hostname,
        port=parts.port or DEFAULT_PORT,
        protocol=protocol,
        devices=query.get("device", ""),
        metadata=query.get("metadata") or "P2PHANDSHAKE",
        segment_bytes=parse_size(query.get("segment", "0")),
        local=query.get("local", ""),
    )
