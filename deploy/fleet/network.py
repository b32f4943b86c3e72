"""The network of the nodes: each in a network namespace of its own (root), or all on loopback.

With namespaces this process moves to one as well, the hub, where a bridge joins the nodes. Nothing outside can reach
them, and they reach nothing outside. A namespace ends with its last process: nothing is left to clean up.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from deploy.fleet.children import Children, FleetError

_CLONE_NEWNET = 0x40000000
_BRIDGE, _NET = "fleet0", "10.77.0"


@dataclass(frozen=True)
class Place:
    """The place of a node or the hub. `prefix` goes before a command that is to run there."""

    address: str
    prefix: tuple[str, ...] = ()


class Loopback:
    """All on 127.0.0.1."""

    hub = Place("127.0.0.1")
    description = "loopback, a directory for each node"

    def add(self, number: int) -> Place:
        return self.hub


class Namespaces:
    """Raises FleetError where the kernel or a missing program does not let us make them."""

    hub = Place(f"{_NET}.254")
    description = "a network namespace for each node"

    def __init__(self, children: Children) -> None:
        self._children = children
        for program in ("ip", "unshare", "nsenter"):
            if shutil.which(program) is None:
                raise FleetError(f"network namespaces need {program} (packages iproute2, util-linux), or --loopback")
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(_CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise FleetError(f"no network namespace can be made ({reason}): use --loopback")
        _ip("link", "set", "lo", "up")
        _ip("link", "add", _BRIDGE, "type", "bridge")
        _ip("address", "add", f"{self.hub.address}/24", "dev", _BRIDGE)
        _ip("link", "set", _BRIDGE, "up")

    def add(self, number: int) -> Place:
        """A namespace that lasts as long as a process of ours in it."""
        address, name = f"{_NET}.{number}", f"namespace{number}"
        namespace = self._children.start(name, ["unshare", "--net", "sleep", "infinity"])
        ours, theirs = os.readlink("/proc/self/ns/net"), f"/proc/{namespace.pid}/ns/net"
        self._children.wait_until(name, lambda: os.readlink(theirs) != ours)
        _ip("link", "add", f"node{number}", "type", "veth", "peer", "name", "eth0", "netns", str(namespace.pid))
        _ip("link", "set", f"node{number}", "master", _BRIDGE, "up")
        place = Place(address, ("nsenter", f"--net={theirs}", "--"))
        _ip("link", "set", "lo", "up", prefix=place.prefix)
        _ip("address", "add", f"{address}/24", "dev", "eth0", prefix=place.prefix)
        _ip("link", "set", "eth0", "up", prefix=place.prefix)
        return place


def _ip(*words: str, prefix: Sequence[str] = ()) -> None:
    done = subprocess.run([*prefix, "ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise FleetError(f"ip {' '.join(words)}: {done.stderr.strip()}; use --loopback")
