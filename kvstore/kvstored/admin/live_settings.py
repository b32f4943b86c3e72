"""The settings that take effect while the daemon serves.

The module owns the list; the part that has a setting gives it its effect. docs/kvstored.md has this list in words.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from kvstore_console.units import human_bytes
from kvstored.clients.certificates import Certificates
from kvstored.clients.handshake import HandshakeServer
from kvstored.clients.own_sockets import OwnSockets
from kvstored.clients.sessions import ClientSession, ClientSessions
from kvstored.clients.shares import TenantShares
from kvstored.clients.tenants import TenantDirectory
from kvstored.clients.tenants.directory import uid_of
from kvstored.clients.tenants.listed_users import ListedUsers
from kvstored.clients.tenants.reach import follow_users
from kvstored.clients.tenants.tokens import Tokens, names_in, read_tokens
from kvstored.config import Config, ConfigError
from kvstored.config.tiers import TierSection
from kvstored.store.assembly import Store
from kvstored.store.blocks import Residency
from kvstored.store.transfer.resize import TierResize

POLICY = frozenset({"policy", "ttl_s", "keep_worth"})  # of each tier
CERTIFICATE = frozenset({"unary.tls_cert", "unary.tls_key", "unary.tls_client_ca"})
TENANTS = frozenset({"[[tenant]]", "tenants.default"})
log = logging.getLogger(__name__)


class LiveTenants:
    """The part of a configuration reload that changes tenants and their bearer tokens while the daemon runs. `tokens`
    is None if the daemon was started without `unary.tokens_file`: then a new file takes effect after a restart."""

    def __init__(
        self,
        tenants: TenantDirectory,
        residency: Residency,
        shares: TenantShares,
        handshake: HandshakeServer,
        own_sockets: OwnSockets,
        sessions: ClientSessions,
        listed_users: ListedUsers,
        tokens: Tokens | None,
    ) -> None:
        self._tenants = tenants
        self._residency = residency
        self._shares = shares
        self._handshake, self._own_sockets, self._sessions = handshake, own_sockets, sessions
        self._listed_users = listed_users
        self._tokens = tokens
        self._entries: list[tuple[bytes, str]] = []

    def begin(self) -> None:
        """Shut out, before a client is served, who could map memory by the listing of the process before and cannot by
        the present one."""
        self._shut_out_unlisted(lambda session: False)

    @property
    def has_tokens(self) -> bool:
        return self._tokens is not None

    def prepare(self, config: Config) -> None:
        """Read the file of bearer tokens that `config` names, without using it yet; `renew_tokens` does that. Raises
        ConfigError, having changed nothing."""
        needs_key = config.encryption.needed_by(config.tenants)
        if needs_key and self._tenants.data_keys is None:
            raise ConfigError(f"{needs_key}: this daemon began without encryption.key_file: restart it")
        path = config.unary.tokens_file
        if self._tokens is not None and path is not None:
            self._entries = read_tokens(path, lambda name: _may_be_tenant(config, name))

    def relist(self, config: Config) -> None:
        """Use the tenants of `config` from now on. Clients that belong to another tenant by that are disconnected.
        Raises ConfigError if the change cannot be saved."""
        tenants = self._tenants
        former, with_tokens = (tenants.listed, tenants.default), names_in(config.unary.tokens_in_use)
        tenants.relist(config.tenants, config.tenant_default)
        try:
            self._listed_users.widen(config.tenants)
            follow_users(tenants, self._residency, with_tokens)
        except OSError as error:
            tenants.relist(*former)
            path = error.filename or tenants.keyring.path
            raise ConfigError(f"{path} cannot be written ({error.strerror}): make room there") from None
        self._shares.set_all()
        self._own_sockets.follow(config.tenants)
        self._sessions.renew_tenants()
        if left := self._shut_out_unlisted(self._is_another_now):
            log.info("%d clients have to connect again: they are of another tenant now", left)

    def _shut_out_unlisted(self, is_another_now: Callable[[ClientSession], bool]) -> int:
        """Let no process see later blocks in memory that it can map no more. Return how many clients were disconnected,
        since they belong to another tenant."""
        narrowed = self._listed_users.narrowed(self._tenants.listed)
        shut_out = {tenant.index_name for tenant in self._tenants.all() if tenant.name in narrowed}

        def is_another(session: ClientSession) -> bool:
            if is_another_now(session):
                shut_out.add(session.tenant.index_name)
                return True
            return False

        left = self._handshake.hang_up(is_another)
        for index_name in shut_out:
            self._handshake.shut_out(index_name)
        self._listed_users.settle(self._tenants.listed)
        return left

    def renew_tokens(self) -> None:
        """Use the bearer tokens that `prepare` has read from their file, from now on."""
        if self._tokens is not None and self._entries:
            self._tokens.replace(self._entries)

    def _is_another_now(self, session: ClientSession) -> bool:
        tenant, may_write = self._tenants.resolve(session.peer), True
        if tenant is not None and session.pool:
            tenant, may_write = self._tenants.pool(session.pool, tenant) or (None, False)
        return tenant is None or (tenant.name, tenant.digest, may_write) != (
            session.tenant.name,
            session.tenant.digest,
            session.may_write,
        )


def _may_be_tenant(config: Config, name: str) -> bool:
    """Return whether a token may belong to the tenant `name`, by the rule of `TenantDirectory.named`."""
    is_user = config.tenant_default == "by-uid" and uid_of(name) is not None
    return is_user or any(section.name == name and not section.is_pool for section in config.tenants)


class LiveSettings:
    """The part of a configuration reload that applies the settings which can change while the daemon runs. `resizes`
    maps a tier's name to the object that changes the tier's capacity. `certificates` belong to the TLS listener; it is
    None without TLS."""

    def __init__(
        self, store: Store, resizes: Mapping[str, TierResize], tenants: LiveTenants, certificates: Certificates | None
    ) -> None:
        self._store = store
        self._resizes = resizes
        self._tenants = tenants
        self._certificates = certificates

    def prepare(self, config: Config) -> None:
        """Check that `config` can be applied, and read the files that it names. Raises ConfigError, having changed
        nothing."""
        host = self._store.host
        least_bytes = host.charged_bytes + config.host.arena_bytes
        if config.host.capacity_bytes < least_bytes:
            raise ConfigError(
                f"host.capacity {human_bytes(config.host.capacity_bytes)} does not hold one arena beside the "
                f"{human_bytes(host.charged_bytes)} of staging and ledger of this daemon; restart it for so little"
            )
        if self._certificates is not None:
            self._certificates.prepare(config.unary)
        self._tenants.prepare(config)

    def apply(self, config: Config, names: set[str]) -> set[str]:
        """Put the changed settings `names` in force with their values in `config`. Return the names of the settings
        that took effect. Raises ConfigError, having changed nothing."""
        applied = names & (TENANTS | {"daemon.log_level"})
        if applied & TENANTS:  # first, since it alone may fail
            self._tenants.relist(config)
        self._tenants.renew_tokens()  # their file may have changed although no setting did
        if self._tenants.has_tokens and config.unary.tokens_file is not None:
            applied |= names & {"unary.tokens_file"}
        if self._certificates is not None and self._certificates.can_renew(config.unary):
            self._certificates.renew()
            applied |= names & CERTIFICATE
        if "daemon.log_level" in applied:
            logging.getLogger().setLevel(config.daemon.log_level.upper())
        for position, tier in enumerate(self._store.residency.tiers):
            if (section := config.tier(tier)) is not None:
                applied |= self._apply_to(position, section, config, names)
        return applied

    def _apply_to(self, position: int, section: TierSection, config: Config, names: set[str]) -> set[str]:
        """Apply the settings of one tier; return the names of the ones that took effect."""
        live = POLICY | {"admission"} | ({"capacity"} if section.name in self._resizes else set())
        keys = {key for key in live if f"{section.name}.{key}" in names}
        if keys & POLICY:
            self._store.replace_policy(config, position)
        if "admission" in keys:
            self._store.replace_admission(config)
        if "capacity" in keys:
            self._resizes[section.name].resize(section.capacity_bytes)
        return {f"{section.name}.{key}" for key in keys}
