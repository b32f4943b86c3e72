"""The keeping of descriptors outside the daemon, so that memory outlives it.

The module owns which names are wanted, which of them the other side (the holder process or systemd) has, and how many
it takes. It does not know what a descriptor is, nor how it is sent. Between the start and `settle` it never waits for
the other side: a descriptor that cannot be sent at once is sent again later (`retry`), and only if it is still wanted
then. Invariants: a descriptor given to `keep` and not `drop`ped is there for the next process, or `unkept` counts it;
the number of descriptors sent is at most the number that the other side keeps.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

log = logging.getLogger(__name__)
_SETTLE_S = 2.0
_SETTLE_STEP_S = 0.01


class HolderError(Exception):
    """An error: descriptors cannot be kept outside the daemon. The message says why and what to do.
    `is_for_want_of_room`: the file system takes no writes.
    """

    def __init__(self, message: str, *, is_for_want_of_room: bool = False) -> None:
        super().__init__(message)
        self.is_for_want_of_room = is_for_want_of_room


def no_listener() -> None:
    """Do nothing. It is the value of `DescriptorHolder.on_behind` while no task retries."""


class DescriptorHolder(ABC):
    """A keeper of descriptors, by name, in another process (the holder process or systemd), for the daemon's next
    process. Any thread may call `keep` and `drop`.
    """

    name: str

    def __init__(self, limit: int | None = None) -> None:
        self.lost = False  # the other side has gone: `reopen`, and keep everything again
        self.on_behind = no_listener  # called, in any thread, when something could not be sent at once
        self.limit = limit  # how many descriptors the other side keeps; None: not known
        self._sending = threading.Lock()
        self._wanted: dict[str, int] = {}  # not sent yet: name -> descriptor, -1 for a drop
        self._kept: set[str] = set()  # names that the other side has
        self._has_warned = False

    @property
    def after_stop(self) -> str:
        """A sentence for an operator: what happens to DRAM when the daemon is stopped in order."""
        return f"{self.name} keeps DRAM for the next start"

    @abstractmethod
    def fetch(self) -> dict[str, int]:
        """Return the descriptors that the former process had kept, by name. The caller owns them. Call it once, before
        anything else.
        """

    @abstractmethod
    def _send(self, name: str, descriptor: int) -> bool:
        """Hand over a descriptor, or with -1 drop one. Return False if that cannot be done now."""

    @abstractmethod
    def close(self, *, forget: bool) -> None:
        """End the connection to the process that keeps the descriptors, as the daemon ends. With `forget`, that process
        keeps nothing."""

    def reopen(self) -> None:  # noqa: B027  # a service manager is never lost
        """Connect to a new process after the event `lost` was set, since the old one has gone. The new one has no
        descriptors yet. Raises HolderError."""

    def keep(self, name: str, descriptor: int) -> bool:
        """Have the other process keep a copy of `descriptor` under `name`. Return whether it does now; if not, `retry`
        tries again. The caller's descriptor stays open."""
        return self._try(name, descriptor)

    def drop(self, name: str) -> None:
        self._try(name, -1)

    def retry(self) -> list[str]:
        """Send the descriptors that could not be sent before. Return the names that the other process keeps now."""
        with self._sending:
            done: list[str] = []
            keeps = [wanted for wanted in self._wanted.items() if wanted[1] >= 0]
            drops = [wanted for wanted in self._wanted.items() if wanted[1] < 0]
            for name, descriptor in (*keeps, *drops, *keeps):  # a kill loses what is not kept; but drops make room
                if name not in self._wanted or not self._has_room(name, descriptor):
                    continue
                if not self._hand_over(name, descriptor):
                    break
                del self._wanted[name]
                if descriptor >= 0:
                    done.append(name)
            return done

    def settle(self) -> list[str]:
        """Send the waiting descriptors for two seconds at most, or until the other process takes no more of them, since
        the daemon is about to end. Return the names that are kept now."""
        done = self.retry()
        give_up_s = time.monotonic() + _SETTLE_S
        while self.is_behind and time.monotonic() < give_up_s:
            time.sleep(_SETTLE_STEP_S)
            done += self.retry()
        return done

    @property
    def unkept(self) -> int:
        return len(self._wanted)

    @property
    def is_behind(self) -> bool:
        """True when a descriptor waits to be sent that the other process has room for."""
        with self._sending:
            return not self.lost and any(self._has_room(name, descriptor) for name, descriptor in self._wanted.items())

    def _try(self, name: str, descriptor: int) -> bool:
        with self._sending:
            self._wanted.pop(name, None)
            if self._has_room(name, descriptor):
                if self._hand_over(name, descriptor):
                    return True
            elif not self._has_warned:
                self._has_warned = True
                log.warning(
                    "the %s keeps %d descriptors at most: memory beyond that will not survive a restart",
                    self.name, self.limit,
                )  # fmt: skip
            self._wanted[name] = descriptor
        if not self.lost:
            self.on_behind()
        return False

    def _forget_late(self) -> None:
        """Keep nothing more: descriptors that were not sent may be closed by now, or their numbers reused."""
        with self._sending:
            self._wanted = {name: descriptor for name, descriptor in self._wanted.items() if descriptor < 0}

    def _has_room(self, name: str, descriptor: int) -> bool:
        return descriptor < 0 or self.limit is None or name in self._kept or len(self._kept) < self.limit

    def _hand_over(self, name: str, descriptor: int) -> bool:
        if not self._send(name, descriptor):
            return False
        if descriptor >= 0:
            self._kept.add(name)
        else:
            self._kept.discard(name)
        return True
