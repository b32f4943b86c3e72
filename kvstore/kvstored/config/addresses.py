"""Addresses to listen on: one parser of "host:port" for every listener, IPv6 in brackets included."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import NamedTuple

from kvstored.config.mistakes import ConfigError, need

_HOST_AND_PORT = re.compile(r"(?:\[([^\[\]]*)\]|([A-Za-z0-9_.-]+|\*)):(\d{1,5})\Z")
_BARE_IPV6 = re.compile(r"(?P<host>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*):(?P<port>\d{1,5})\Z")


class Address(NamedTuple):
    """A TCP address to listen on. `host` has no brackets; "*" stands for every interface."""

    host: str
    port: int

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.is_ipv6 else f"{self.host}:{self.port}"


def address_of(name: str, value: str, example: str, prefix: str = "") -> Address:
    """Return the address in the text `value` of the setting `name`: `prefix` (such as "tcp://"), then "host:port".
    Raises ConfigError for anything else; the message shows `example`.
    """
    found = _HOST_AND_PORT.match(value.removeprefix(prefix)) if value.startswith(prefix) else None
    bare = None if found else _BARE_IPV6.match(value.removeprefix(prefix))
    need(
        bare is None,
        f"{name} {value!r}: an IPv6 address goes in brackets: write "
        f'"{prefix}[{bare["host"] if bare else ""}]:{bare["port"] if bare else ""}"',
    )
    need(
        found is not None and 0 < int(found[3]) < 65536 and (found[1] is None or _is_ipv6(found[1])),
        f'{name} {value!r} is no address: write "{prefix}host:port", for instance "{example}"',
    )
    assert found is not None
    return Address(found[1] if found[1] is not None else found[2], int(found[3]))


def numeric(name: str, address: Address) -> Address:
    """Return `address` with its host name replaced by an IP address, IPv4 first. Raises ConfigError, naming the setting
    `name`, for an unknown host.
    """
    if address.host == "*" or address.is_ipv6:
        return address
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"{name}: no address for {address.host!r}: {error.strerror or error}") from None
    host = min(found, key=lambda each: each[0] != socket.AF_INET)[4][0]
    return Address(str(host), address.port)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True
