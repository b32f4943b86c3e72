"""Containers whose programs are one tenant, since they run under one uid: the daemon notices them and says so once.

A tenant is a user as the kernel names it to the daemon. Containers that share a user namespace share uids, so that
programs of one uid in two of them read each other's blocks. The module decides nothing: a cgroup is a label, which its
process may have chosen.
"""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Collection

log = logging.getLogger(__name__)
MAX_USERS, MAX_CONTAINERS = 1024, 16  # that are remembered, containers for each user; the last ones
_SHOWN = 4
_ID = re.compile(r"[0-9a-f]{64}")
_SCOPE = re.compile(
    r"(docker|libpod|podman|crio|cri-containerd|containerd|nerdctl|machine)[-:].+\.scope\Z|lxc\.payload\..+|systemd-nspawn@.+"
    r"|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\..+\.scope\Z"  # ALLOCATION.TASK of Nomad
)
_MONITOR = re.compile(r"(libpod|crio)-conmon-")  # beside a container, not in it
_PARENTS = {"docker", "lxc", "lxc.payload", "lxd", "libpod_parent", "garden", "ecs", "machine.slice", "nspawn"}
_UNIT = re.compile(r"\.(slice|scope|service|mount|socket|swap)\Z")  # of systemd, which puts all that it starts in one
_NOT_CONTAINERS = ("slurm", "openrc.", "init")  # names at the top, where others than systemd start services and jobs
_POD = re.compile(r"(kubepods.*-)?pod[^/]+")


def container_of(cgroup: str) -> str:
    """Return the path of the innermost container in the path `cgroup`, or "" for a service, a login or the root.

    A path that no known service manager makes counts as a container's. A path that begins with `/..` is outside the
    daemon's own cgroup namespace, so it belongs to another container or to the host."""
    parts = [part for part in cgroup.split("/") if part]
    outside = next((place for place, part in enumerate(parts) if part != ".."), len(parts))
    for place in range(len(parts) - 1, outside - 1, -1):
        if _is_container(parts, place):
            return "/" + "/".join(parts[: place + 1])
    if not outside:
        is_managed = not parts or parts[0].startswith(_NOT_CONTAINERS) or any(map(_UNIT.search, parts))
        return "" if is_managed else "/" + "/".join(parts)
    first = parts[outside : outside + 1]
    return "/../" + first[0] if first and not _UNIT.search(first[0]) else ""


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


class SeenContainers:
    """A record of the containers from which each user has connected since the start, also of containers that have
    ended. When a second container of a user connects, the log says once that both share one tenant's blocks."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, int], OrderedDict[str, None]] = OrderedDict()
        self._said: set[tuple[str, int]] = set()

    def note(self, tenant: str, uid: int, cgroup: str) -> None:
        """Note that the user `uid` of the tenant `tenant` opened a session from a process in `cgroup`. Nothing is noted
        for a cgroup that is unknown or not a container's."""
        place, who = container_of(cgroup), (tenant, uid)
        if not place:
            return
        places = self._seen.setdefault(who, OrderedDict())
        self._seen.move_to_end(who)
        places[place] = None
        places.move_to_end(place)
        if len(places) > MAX_CONTAINERS:
            places.popitem(last=False)
        if len(self._seen) > MAX_USERS:
            self._said.discard(self._seen.popitem(last=False)[0])
        if len(places) > 1 and who not in self._said:
            self._said.add(who)
            log.warning("%s", _sentence(*who, places))

    def sentences(self) -> list[str]:
        """Return one sentence for each user who came from several containers."""
        return [_sentence(*who, places) for who, places in self._seen.items() if len(places) > 1]


def _sentence(tenant: str, uid: int, places: Collection[str]) -> str:
    named = sorted(map(_shown, places))
    listed = ", ".join(named[:_SHOWN]) + (f" and {len(named) - _SHOWN} more" if len(named) > _SHOWN else "")
    count = f"{len(named)} or more" if len(named) == MAX_CONTAINERS else str(len(named))
    return (
        f"isolation is by uid; these {count} containers are one tenant, {tenant} (uid {uid}): {listed}; give them "
        "users of their own, or a [[tenant]] each by cgroups or socket"
    )


def _shown(place: str) -> str:
    """Return a container's name for people, with its id cut as the container tools do."""
    name = _ID.sub(lambda found: found[0][:12], place.rpartition("/")[2].removesuffix(".scope"))
    return "".join(char if char.isprintable() else "?" for char in name)[:64]
