"""Containers whose programs are one tenant, since they run under one uid: noticed, and said once.

A tenant is a user as the kernel names it to the daemon. Containers that share a user namespace share uids, so that
programs of one uid in two of them read each other's blocks. Never decides anything: a cgroup is a label, which its
process may have chosen.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Protocol

log = logging.getLogger(__name__)
MAX_NOTICED = 4096  # users of whom it was said; beyond, it may be said again
_SHOWN = 4
_ID = re.compile(r"[0-9a-f]{64}")
_SCOPE = re.compile(
    r"(docker|libpod|podman|crio|cri-containerd|containerd|nerdctl|machine)[-:].+\.scope\Z|lxc\.payload\..+|systemd-nspawn@.+"
)
_MONITOR = re.compile(r"(libpod|crio)-conmon-")  # beside a container, not in it
_PARENTS = {"docker", "lxc", "lxc.payload", "lxd", "libpod_parent", "garden", "ecs", "machine.slice", "nspawn"}
_POD = re.compile(r"(kubepods.*-)?pod[^/]+")


class Caller(Protocol):
    """What is looked at of a peer."""

    @property
    def uid(self) -> int: ...
    @property
    def cgroup(self) -> str: ...


class Named(Protocol):
    """What is looked at of a tenant."""

    @property
    def name(self) -> str: ...


class Connected(Protocol):
    """What is looked at of a session."""

    @property
    def peer(self) -> Caller: ...
    @property
    def tenant(self) -> Named: ...


def container_of(cgroup: str) -> str:
    """Return the path of the innermost container that a cgroup's path names; "" for a service, a login or the root.

    A path that begins with `/..` is outside the daemon's own cgroup namespace, so of another container or the host.
    """
    parts = [part for part in cgroup.split("/") if part]
    outside = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    for place in range(len(parts) - 1, outside - 1, -1):
        if _is_container(parts, place):
            return "/" + "/".join(parts[: place + 1])
    if not outside:
        return ""
    first = parts[outside : outside + 1]
    is_host = not first or first[0].endswith((".slice", ".scope", ".service"))
    return "/.." if is_host else "/../" + first[0]


def _is_container(parts: list[str], place: int) -> bool:
    part, above = parts[place], parts[place - 1] if place else ""
    if _MONITOR.match(part):
        return False
    if _ID.search(part) or _SCOPE.match(part):
        return True
    if part.endswith(".slice") and not _POD.fullmatch(part):
        return False
    in_kubernetes = any(each.startswith("kubepods") for each in parts[:place])
    return above in _PARENTS or (in_kubernetes and bool(_POD.fullmatch(part) or _POD.fullmatch(above)))


class SharedTenants:
    """Says in the log, once for each user, that programs of several containers are one tenant."""

    def __init__(self) -> None:
        self._noticed: set[tuple[str, int]] = set()

    def look(self, arrived: Connected, connected: Iterable[Connected]) -> None:
        """Compare a session that was opened with all that are open."""
        who = (arrived.tenant.name, arrived.peer.uid)
        if who in self._noticed or not arrived.peer.cgroup:
            return
        alike = [each for each in connected if (each.tenant.name, each.peer.uid) == who]
        for sentence in shared_by_containers(alike):
            if len(self._noticed) >= MAX_NOTICED:
                self._noticed.clear()
            self._noticed.add(who)
            log.warning("%s", sentence)


def shared_by_containers(connected: Iterable[Connected]) -> list[str]:
    """Return a sentence for each user whose open sessions come from more than one container, or from a container and
    from outside of all. Sessions whose cgroup is not known do not count."""
    places: dict[tuple[str, int], set[str]] = {}
    for session in connected:
        if session.peer.cgroup:
            who = (session.tenant.name, session.peer.uid)
            places.setdefault(who, set()).add(container_of(session.peer.cgroup))
    return [_sentence(name, uid, found) for (name, uid), found in sorted(places.items()) if len(found) > 1]


def _sentence(tenant: str, uid: int, places: set[str]) -> str:
    named = sorted(_shown(place) for place in places if place)
    listed = ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
    what = f"these {len(named)} containers" if len(named) > 1 else "this container"
    beside = (
        " and programs outside of it" if len(named) == 1 else " and programs outside of them" if "" in places else ""
    )
    return (
        f"isolation is by uid; {what}{beside} are one tenant, {tenant} (uid {uid}): {listed}; give them users of their "
        "own, or a daemon each"
    )


def _shown(place: str) -> str:
    """A container's name for people: ids are cut as the tools do that made them."""
    name = _ID.sub(lambda found: found[0][:12], place.rpartition("/")[2].removesuffix(".scope"))
    text = name if name != ".." else "the host"
    return "".join(char if char.isprintable() else "?" for char in text)[:64]
