"""The list of tenants and of their tokens, changed while the daemon serves.

What users stored follows them as at a start (tenants/reach.py). Clients that are another tenant's from now on, or of a
name that stands for other blocks, have to connect again; all others go on.
"""

from __future__ import annotations

import logging

from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.sessions import Session
from kvstored.clients.shares import TenantShares
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.directory import uid_of
from kvstored.clients.tenants.reach import follow_users
from kvstored.clients.tenants.tokens import Tokens, names_in, read_tokens
from kvstored.config import Config, ConfigError
from kvstored.store.blocks import Residency

log = logging.getLogger(__name__)


class LiveTenants:
    """`tokens` is None where the daemon was started without `unary.tokens_file`: another then waits for a restart."""

    def __init__(
        self,
        tenants: TenantDirectory,
        residency: Residency,
        shares: TenantShares,
        handshake: HandshakeServer,
        tokens: Tokens | None,
    ) -> None:
        self._tenants = tenants
        self._residency = residency
        self._shares = shares
        self._handshake = handshake
        self._tokens = tokens
        self._entries: list[tuple[bytes, str]] = []

    def prepare(self, config: Config) -> None:
        """Read the tokens. Raises ConfigError, with everything as it was."""
        path = config.unary.tokens_file
        if self._tokens is not None and path is not None:
            self._entries = read_tokens(path, lambda name: _may_be_tenant(config, name))

    def relist(self, config: Config) -> None:
        """Let the tenants be those of `config`. Raises ConfigError where that cannot be written down."""
        tenants = self._tenants
        former, with_tokens = (tenants.listed, tenants.default), names_in(config.unary.tokens_in_use)
        tenants.relist(config.tenants, config.tenant_default)
        try:
            follow_users(tenants, self._residency, with_tokens)
        except OSError as error:
            tenants.relist(*former)
            raise ConfigError(f"{tenants.keyring.path} cannot be written ({error.strerror}): make room there") from None
        self._shares.set_all()
        left = self._handshake.hang_up(self._is_another_now)
        if left:
            log.info("%d clients have to connect again: they are of another tenant now", left)

    def renew_tokens(self) -> None:
        """Let the tokens be those that `prepare` has read."""
        if self._tokens is not None and self._entries:
            self._tokens.replace(self._entries)

    def _is_another_now(self, session: Session) -> bool:
        tenant = self._tenants.resolve(session.peer)
        return tenant is None or (tenant.name, tenant.digest) != (session.tenant.name, session.tenant.digest)


def _may_be_tenant(config: Config, name: str) -> bool:
    """Whether a token may be a tenant's, as `TenantDirectory.named` will have it."""
    is_user = config.tenant_default == "by-uid" and uid_of(name) is not None
    return is_user or any(section.name == name for section in config.tenants)
