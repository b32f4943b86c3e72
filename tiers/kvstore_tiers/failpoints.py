"""Named fault injection: places in the source where a test can make the process die, fail or wait.

The module owns the list of names and the armed ones. It acts only when armed; an unarmed `hit` takes one look at a
module global. Arming: `arm("nvme.after-slot-write=kill@3")` in a test, or the environment variable KVSTORED_FAILPOINTS,
a list like `name=kill;name2=error:ENOSPC;name3=delay:0.1@3`. Actions: `kill` (SIGKILL to this process), `error:ERRNO`
(an OSError), `delay:SECONDS`. `@N`: at the N-th hit alone; `@N-M`: from the N-th to the M-th; without it at every hit.
Invariants: each declared name occurs in the source (tested); an unknown name in `arm` is an error, since a failpoint
that never fires makes a test that cannot fail.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from dataclasses import dataclass

ENVIRONMENT = "KVSTORED_FAILPOINTS"

REGISTRY: dict[str, str] = {
    "host.before-copy": "a copy thread is about to copy a payload into an arena",
    "host.before-header": "the payload is in the arena, its header is not",
    "nvme.read": "an I/O thread is about to read a slot",
    "nvme.before-slot-write": "an I/O thread is about to write a slot; the old record may still stand",
    "nvme.after-invalidate": "the old record of a slot about to be overwritten is withdrawn",
    "nvme.after-slot-write": "a slot image is written, nothing is synced, no record names it",
    "nvme.after-relocation": "a block is copied to another slot and not synced; its old slot is as it was",
    "nvme.sync-start": "a group commit took its batch",
    "nvme.after-data-sync": "slot images of the batch are on the medium, their records are not written",
    "nvme.between-records": "withdrawn records of the batch are written, new ones are not",
    "nvme.after-records-write": "all records of the batch are written, not synced",
    "nvme.after-record-sync": "records are on the medium, no request was answered",
    "nvme.slab-allocated": "a new slab file has its space, no superblock and no final name",
    "nvme.slab-before-rename": "a new slab file is complete under its temporary name",
    "nvme.slab-after-rename": "a new slab file has its name, the directory is not synced",
    "nvme.slab-records-zeroed": "the records of a free slab are gone, its geometry is still the old one",
    "nvme.slab-reformat": "a free slab has its new front superblock, not yet the one at its end",
    "nvme.slab-before-cut": "a slab file has a shorter geometry in both superblocks, and its old length",
    "nvme.recover-before-repair": "recovery read the records and is about to withdraw the bad ones",
    "nvme.recover-after-repair": "recovery withdrew records, and synced that",
    "nvme.probe": "an I/O thread is about to write and read scratch bytes, to see whether the medium works again",
    "nvme.seal": "everything is committed, the seal that says so is not written",
}


@dataclass
class _Armed:
    action: str
    argument: str
    first_hit: int  # 0: at every hit
    last_hit: int
    hits: int = 0


_armed: dict[str, _Armed] = {}
_counting = threading.Lock()


def declare(name: str, description: str) -> None:
    """Add the failpoint `name` (a place in the source at which tests can cause a failure) to the known names.
    `description` says what the program does at that place. Raises ValueError if the name has another description
    already.
    """
    if REGISTRY.setdefault(name, description) != description:
        raise ValueError(f"failpoint {name!r} is declared twice")


def hit(name: str) -> None:
    """Fail, wait or kill this process if a test armed the failpoint `name`; otherwise do nothing. Source code calls it
    at each place that a test may break. Raises OSError if the armed action is an error.
    """
    if _armed:
        _fire(name)


def arm(specification: str) -> None:
    """Arm the failpoints (places at which tests cause failures) that `specification` lists, such as
    "nvme.read=error:EIO@3;nvme.seal=kill". Raises ValueError for an undeclared name or an unknown action.
    """
    armed = _parse(specification)
    unknown = sorted(set(armed) - set(REGISTRY))
    if unknown:
        raise ValueError(f"no such failpoint: {', '.join(unknown)}; there are: {', '.join(sorted(REGISTRY))}")
    _armed.update(armed)


def are_armed() -> bool:
    """Return True if any failpoint is armed, so that some place in the program may wait or fail on purpose."""
    return bool(_armed)


def disarm() -> None:
    """Disarm all failpoints (places at which tests cause failures), and forget how often each was passed."""
    _armed.clear()


def unknown_names() -> list[str]:
    """Return the names of armed failpoints that no module has declared. A program calls it once all its modules are
    imported.
    """
    return sorted(set(_armed) - set(REGISTRY))


def hits(name: str) -> int:
    """Return how often the program has passed the armed failpoint `name`; 0 if it is not armed."""
    entry = _armed.get(name)
    return entry.hits if entry else 0


def _parse(specification: str) -> dict[str, _Armed]:
    armed = {}
    for item in filter(None, (part.strip() for part in specification.split(";"))):
        name, equals, rest = item.partition("=")
        rest, _, count = rest.partition("@")
        action, _, argument = rest.partition(":")
        valid = (
            (action == "kill" and not argument)
            or (action == "error" and argument in errno.errorcode.values())
            or (action == "delay" and argument.replace(".", "", 1).isdigit())
        )
        first, dash, last = count.partition("-")
        counted = not count or (first.isdigit() and (last.isdigit() or not dash))
        if not equals or not valid or not counted:
            raise ValueError(
                f"{item!r} is not NAME=kill, NAME=error:ERRNO or NAME=delay:SECONDS, with @N or @N-M after it"
            )
        armed[name] = _Armed(action, argument, int(first or 0), int(last or first or 0))
    return armed


def _fire(name: str) -> None:
    entry = _armed.get(name)
    if entry is None:
        return
    with _counting:
        entry.hits += 1
        if entry.first_hit and not entry.first_hit <= entry.hits <= entry.last_hit:
            return
    if entry.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif entry.action == "error":
        number = getattr(errno, entry.argument)
        raise OSError(number, f"{os.strerror(number)} (failpoint {name})")
    else:
        time.sleep(float(entry.argument))


_armed.update(_parse(os.environ.get(ENVIRONMENT, "")))
