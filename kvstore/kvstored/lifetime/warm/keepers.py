"""Keepers of descriptors while there is no daemon: systemd's file-descriptor store, or the holder process.

Owns the choice, and systemd's way of keeping: FDSTORE=1 messages, and $LISTEN_FDS at the start. Never knows what a
descriptor is.
Invariant: systemd never has two descriptors of ours under one name.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from kvstore_tiers.arena_memory import empty_memory
from kvstored.lifetime.notify import (
    notify_about,
    offers_descriptor_store,
    store_is_preserved,
    store_limit,
    stored_descriptors,
    wait_for_manager,
)
from kvstored.lifetime.warm.holder_keeper import HOLDER_SOCKET, HolderKeeper
from kvstored.lifetime.warm.keeper import Keeper, KeeperError

log = logging.getLogger(__name__)
HOLDER_SERVICE = "KVSTORED_HOLDER"  # in the environment: the socket of kvstored-holder.service


class SystemdKeeper(Keeper):
    """FDSTORE=1, FDNAME and SCM_RIGHTS on $NOTIFY_SOCKET; at the start, $LISTEN_FDS. See sd_pid_notify_with_fds(3)."""

    name = "systemd"

    def __init__(self) -> None:
        super().__init__(store_limit())

    @property
    def after_stop(self) -> str:
        if store_is_preserved():
            return "systemd keeps DRAM for the next start of the unit"
        return (
            "DRAM is kept over a restart and lost with a stop: this systemd empties its store of descriptors when the "
            "unit stops; kvstored-holder.service would keep it"
        )

    def fetch(self) -> dict[str, int]:
        found = stored_descriptors()
        self._kept.update(found)
        return found

    def _send(self, name: str, descriptor: int) -> bool:
        if descriptor < 0:
            return notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
        if name in self._kept:  # a manager does not replace: it would hand out both
            if not notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}"):
                return False
            self._kept.discard(name)
        # Memory has nothing to poll for, and a manager that polls it would find an error there and drop it.
        return notify_about([descriptor], "FDSTORE=1", f"FDNAME={name}", "FDPOLL=0")

    def close(self, *, forget: bool) -> None:
        self._forget_late()
        self.settle()
        wait_for_manager()


def dismiss_others(keeper: Keeper | None, state_dir: Path) -> None:
    """Discard memory that an earlier daemon left with a keeper that this one does not use."""
    if not isinstance(keeper, SystemdKeeper):
        for name, descriptor in stored_descriptors().items():
            empty_memory(descriptor)
            os.close(descriptor)
            notify_about([], "FDSTOREREMOVE=1", f"FDNAME={name}")
    is_in_use = isinstance(keeper, HolderKeeper) and not keeper.is_service
    if not is_in_use and (state_dir / HOLDER_SOCKET).is_socket():
        try:
            unused = HolderKeeper(state_dir, 0.0, may_start=False)
        except KeeperError:
            return
        for descriptor in unused.fetch().values():
            empty_memory(descriptor)
            os.close(descriptor)
        unused.close(forget=True)


def choose_keeper(mode: str, state_dir: Path, linger_s: float) -> Keeper | None:
    """The keeper that `host.warm_restart` names; None for "off", and where the state directory has no room for its
    socket: blocks on NVMe are served without. Raises KeeperError.

    "auto" is the holder that runs as a service of its own, where $KVSTORED_HOLDER names its socket and it answers; else
    systemd where the unit has a store; else a holder of our own.
    """
    if mode == "off":
        return None
    service = os.environ.get(HOLDER_SERVICE, "")
    if mode == "auto" and service:
        try:
            return HolderKeeper(Path(service).parent, linger_s, service=Path(service).name)
        except KeeperError as error:
            log.warning("the holder service at %s is not used: %s", service, error)
    if mode == "systemd" and not os.environ.get("NOTIFY_SOCKET"):
        raise KeeperError(
            'host.warm_restart = "systemd", but no service manager started this daemon (no NOTIFY_SOCKET): '
            'start it by its unit, or set host.warm_restart = "holder"'
        )
    offers_store = bool(os.environ.get("NOTIFY_SOCKET")) and offers_descriptor_store()
    if mode == "systemd" or (mode == "auto" and offers_store):
        return SystemdKeeper()
    try:
        return HolderKeeper(state_dir, linger_s)
    except KeeperError as error:
        if mode == "holder" and not error.is_for_want_of_room:
            raise
        log.warning("what is in memory will not survive a restart: %s", error)
        return None
