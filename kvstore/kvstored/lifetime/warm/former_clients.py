"""Clients of the former daemon: their leases stand until each reconnects or its process has ended.

The module owns the knowledge about them (from the ledger) and the watch over their processes. A client that reconnects
names its last token and gets its session and its leases again, under their old numbers. The lease table decides what a
lease means. Invariants: a slot that a former client may be reading is not recycled before that client has reconnected
and released it, or has ended; a lease is given back whole, over the very same bytes, or not at all. Device memory in a
lease that was not taken over belongs to no daemon any more: the client that has it mapped keeps it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass

from kvstore_proto.arena import DEVICE_ARENAS
from kvstored.clients.sessions import ClientSession
from kvstored.lifetime.warm.ledger import FormerSession, Ledger, tier_of_chunk
from kvstored.lifetime.warm.restart import Adopted, Place
from kvstored.process import start_ticks
from kvstored.store.blocks import Residency
from kvstored.store.leases import LeaseTable
from kvstored.telemetry import Counters

log = logging.getLogger(__name__)
UNSEEN_PATIENCE_S = 60.0  # for a client whose process we cannot see: in another pid namespace
_NO_TOKEN = bytes(16)


@dataclass(slots=True)
class _Absent:
    """A former client that has not reconnected. `pidfd` becomes readable at its end; -1 if it cannot be seen."""

    former: FormerSession
    pidfd: int
    patience: asyncio.TimerHandle | None = None


class FormerClients:
    """The clients of the daemon's former process that may still read its memory. Call `restore` once, before any client
    is served. Set `keeps_leases` when the daemon stops: a client that leaves after that may get its leases back from
    the next process."""

    def __init__(self, ledger: Ledger, leases: LeaseTable, counters: Counters) -> None:
        self._ledger = ledger
        self._leases = leases
        self._counters = counters
        self._absent: dict[int, _Absent] = {}
        self._by_token: dict[bytes, int] = {}
        self.keeps_leases = False

    @property
    def epoch(self) -> bytes:
        """The bytes that identify the numbering of arenas: while they stay the same, a client may go on using the
        arenas it has mapped.
        """
        return self._ledger.epoch

    def restore(self, adopted: Adopted, residency: Residency, expires_ns: int) -> None:
        """Make the leases of the former process valid again until `expires_ns` (monotonic), also leases over slots
        whose block is gone. Free such slots that no lease covers. `adopted` is the memory that was taken over."""
        for former in self._ledger.sessions():
            pidfd = _watch(former)
            if pidfd is None:
                self._forget(former)
                continue
            absent = self._absent[former.session_id] = _Absent(former, pidfd)
            self._wait_for(absent)
            for token in former.tokens:
                if token != _NO_TOKEN:
                    self._by_token[token] = former.session_id
            for lease in former.leases:
                if not self._restore(former.session_id, lease.lease_id, lease.places, adopted, residency, expires_ns):
                    self._ledger.end_lease(lease.lease_id)
        for slot, tenant in adopted.retired.values():
            self._leases.retire(slot, tenant)
        self._leases.record_in(self._ledger, self._ledger.last_lease_id)

    def arrived(self, session: ClientSession, token: bytes) -> list[int]:
        """Note that the client of `session` connects. If `token` is a session token of the former process, `session`
        gets the number that the client's session had. Return the numbers of the leases that the client has again."""
        former_id = self._by_token.get(token) if token else None
        absent = self._absent.get(former_id) if former_id is not None else None
        start = start_ticks(session.peer.pid) or 0
        if absent is None or not self._leases.belong_to(absent.former.session_id, session.tenant_id):
            self._ledger.open_session(session.session_id, session.peer.pid, start, session.token)
            return []
        session.session_id = absent.former.session_id
        self._no_longer_absent(absent)
        self._ledger.open_session(session.session_id, session.peer.pid, start, session.token, token)
        found = self._leases.of_session(session.session_id)
        self._counters.add("warm_leases", len(found))
        return found

    def left(self, session: ClientSession) -> None:
        self._ledger.close_session(session.session_id)

    def close(self) -> None:
        """Stop watching the former clients. Clients that still exist stay in the ledger (the record for the next
        process)."""
        for absent in list(self._absent.values()):
            self._no_longer_absent(absent)

    def _restore(
        self,
        session_id: int,
        lease_id: int,
        places: list[Place],
        adopted: Adopted,
        residency: Residency,
        expires_ns: int,
    ) -> bool:
        """Restore a lease; return False if one of its slots will be used anew, or none was taken over. A chunk of a
        device that was not taken over belongs to no daemon: the client keeps it, and goes on reading its blocks.
        """
        rows, slots, tenant = [], [], -1
        for place in places:
            row = adopted.rows.get(place, -1)
            if row >= 0:
                rows.append(row)
                slots.append(
                    residency.slot(row, residency.mapped if place[0] < DEVICE_ARENAS else tier_of_chunk(place[0]))
                )
                tenant = residency.tenant_of(row)
            elif place in adopted.retired:
                slot, tenant = adopted.retired[place]
                slots.append(slot)
            elif place[0] < DEVICE_ARENAS or place[0] in adopted.containers:
                return False
        if not slots:
            return False
        residency.pin_run(rows)
        self._leases.restore(lease_id, session_id, tenant, [residency.token(row) for row in rows], slots, expires_ns)
        return True

    def _wait_for(self, absent: _Absent) -> None:
        loop = asyncio.get_running_loop()
        if absent.pidfd >= 0:
            loop.add_reader(absent.pidfd, self._ended, absent)
        else:
            absent.patience = loop.call_later(UNSEEN_PATIENCE_S, self._ended, absent)

    def _ended(self, absent: _Absent) -> None:
        """Handle the end of a former client's process: slots that it could read may be recycled."""
        self._no_longer_absent(absent)
        ended = self._leases.release_session(absent.former.session_id)
        self._ledger.close_session(absent.former.session_id)
        log.info("a client of the daemon before (pid %d) has ended, with %d leases", absent.former.pid, ended)

    def _no_longer_absent(self, absent: _Absent) -> None:
        del self._absent[absent.former.session_id]
        for token in absent.former.tokens:
            self._by_token.pop(token, None)
        if absent.patience is not None:
            absent.patience.cancel()
        if absent.pidfd >= 0:
            asyncio.get_running_loop().remove_reader(absent.pidfd)
            os.close(absent.pidfd)

    def _forget(self, former: FormerSession) -> None:
        for lease in former.leases:
            self._ledger.end_lease(lease.lease_id)
        self._ledger.close_session(former.session_id)


def _watch(former: FormerSession) -> int | None:
    """Return a descriptor that becomes readable when the process ends; -1 if it cannot be seen; None if it has
    ended.
    """
    if not former.pid:
        return -1
    try:
        pidfd = os.pidfd_open(former.pid)
    except ProcessLookupError:
        return None
    except OSError:
        return -1
    if former.start_ticks and start_ticks(former.pid) != former.start_ticks:
        os.close(pidfd)
        return None  # another process has that number now
    return pidfd
