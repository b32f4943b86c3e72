"""The handshake sockets of tenants that have one of their own, each in a directory that is mounted where the tenant
runs: a client that reaches it is that tenant, with any uid.

The directories stay when the daemon stops, since a pod that has mounted one would not see its successor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from kvstored.clients.handshake import HandshakeServer
from kvstored.config import TenantSection
from kvstored.config.recognition import TENANTS
from kvstored.socket_files import SocketFiles
from kvstored.sockets import SocketError, clear_stale, listen_to_all, prepare_own_directory

log = logging.getLogger(__name__)


class OwnSockets:
    """The own sockets of tenants, below the socket directory `directory`. Their clients are served by `handshake`, and
    `files` binds them again if their files are removed."""

    def __init__(self, directory: Path, handshake: HandshakeServer, files: SocketFiles) -> None:
        self._directory = directory / TENANTS
        self._handshake = handshake
        self._files = files
        self._bound: set[str] = set()

    def path_of(self, tenant: str) -> Path:
        """Return the path of the own socket of the tenant `tenant`."""
        return self._directory / tenant / self._handshake.path.name

    def follow(self, listed: Iterable[TenantSection], *, required: bool = False) -> None:
        """Listen on the sockets of those tenants in `listed` that have one, and on no others. A socket that cannot be
        made is named in the log, and tried again later; with `required` SocketError is raised."""
        wanted = {section.name for section in listed if section.socket}
        for tenant in self._bound - wanted:
            self._handshake.stop(tenant)
            self._files.remove(self.path_of(tenant))
        for tenant in sorted(wanted - self._bound):
            path, is_bound = self.path_of(tenant), False
            try:
                clear_stale(path)
                self._listen(tenant)
                is_bound = True
            except SocketError as error:
                if required:
                    raise
                log.error("%s", error)
            self._files.watch(path, partial(self._listen_again, tenant), is_bound=is_bound)
        self._bound = wanted

    def _listen(self, tenant: str) -> None:
        path = self.path_of(tenant)
        prepare_own_directory(path.parent)
        self._handshake.start(listen_to_all(path), tenant)

    async def _listen_again(self, tenant: str) -> None:
        if tenant in self._bound:
            self._listen(tenant)
