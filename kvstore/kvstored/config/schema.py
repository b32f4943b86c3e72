"""The dataclasses of the configuration: one frozen dataclass for each section, sizes in bytes, paths absolute. Tiers:
`tiers/`.

Defaults live in reference.toml alone; these classes have none, so that the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from kvstored.config.tiers import NvmeSection, SharedSection, TierSection


@dataclass(frozen=True)
class DaemonSection:
    socket_dir: Path
    socket_group: str
    admin_group: str
    state_dir: Path
    record: Path | None
    record_tokens: bool
    codec_profiles: Path | None
    log_level: str
    nice: int
    state_rate_bytes: int


@dataclass(frozen=True)
class ScrubSection:
    enabled: bool
    rate_bytes: int
    interval_s: float
    start_s: float
    books_s: float


@dataclass(frozen=True)
class DurabilitySection:
    mode: str
    batch_ms: int
    batch_blocks: int


@dataclass(frozen=True)
class PutSection:
    in_place: bool


@dataclass(frozen=True)
class LimitsSection:
    max_clients: int
    handshakes_per_user: int
    stream_connections: int
    admin_connections: int
    max_keys: int
    max_block_bytes: int
    staging_per_client_bytes: int
    inflight_per_client: int
    clients_per_tenant: int
    requests_per_tenant: int
    moving_per_tenant_bytes: int
    moving_bytes: int
    leases_per_client: int
    lease_ttl_ms: int
    limbo_per_tenant_bytes: int
    pinned_per_tenant_bytes: int
    pinned_per_owner_bytes: int
    message_bytes: int
    ghosts_per_tenant: int
    misses_per_tenant: int


@dataclass(frozen=True)
class MovementSection:
    acquire_wait_ms: int
    queue_blocks: int
    in_flight: int
    prefetch_budget_bytes: int
    prefetch_quiet_ms: int
    demotion_rate_bytes: int


@dataclass(frozen=True)
class PrefetchSection:
    """The section `[prefetch]` of the configuration. A `budget_bytes_per_s` of 0 sets no limit. `model` is the file for
    the predictor `learned`.
    """

    enabled: bool
    predictor: str
    model: Path | None
    horizon_s: float
    min_probability: float
    waste_limit: float
    budget_bytes_per_s: int


@dataclass(frozen=True)
class IndexSection:
    slots: int


@dataclass(frozen=True)
class MetricsSection:
    """The section `[metrics]` of the configuration. `listen` is host:port of the HTTP endpoint, "" for none."""

    listen: str
    connections: int


@dataclass(frozen=True)
class TracesSection:
    """The section `[traces]` of the configuration. `endpoint` is the URL of an OTLP collector, "" for none; `sample`
    the share of requests without a trace of their own that begin one; `queue` how many spans may wait."""

    endpoint: str
    sample: float
    queue: int


@dataclass(frozen=True)
class EventsSection:
    """The section `[events]` of the configuration. `listen` and `replay` are ZMQ addresses, "" for none. `tenant` is
    the one tenant whose blocks are published, "" for all.
    """

    listen: str
    replay: str
    topic: str
    node: str
    tenant: str
    encoding: str
    tokens: bool
    buffer: int
    connections: int


@dataclass(frozen=True)
class UnarySection:
    """The section `[unary]` of the configuration. `listen` is host:port of the TCP listener, "" for none. A path that
    is not set is None.
    """

    enabled: bool
    message_bytes: int
    calls: int
    connections: int
    listen: str
    tokens_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None

    @property
    def tokens_in_use(self) -> Path | None:
        """The tokens file, or None if unary calls are disabled."""
        return self.tokens_file if self.enabled else None


@dataclass(frozen=True)
class ClusterSection:
    """The section `[cluster]` of the configuration. `secret_file` is the secret of the nodes that may read each other's
    blocks in remote tiers; None: this node alone.
    """

    secret_file: Path | None


@dataclass(frozen=True)
class EncryptionSection:
    """The section `[encryption]` of the configuration. `key_file` has the master key, under which the tenants' keys
    are kept, `former_key_file` the one before. `default` says whether blocks at rest are encrypted for a tenant that
    does not say."""

    key_file: Path | None
    former_key_file: Path | None
    default: bool

    def needed_by(self, tenants: tuple[TenantSection, ...]) -> str:
        """Return the setting that needs a master key, "" if none does."""
        if self.default:
            return "encryption.default"
        return next((f"tenant {tenant.name}: encrypt" for tenant in tenants if tenant.encrypt), "")


@dataclass(frozen=True)
class TierShare:
    """A tenant's share of one tier: `min_bytes` are guaranteed, more than `max_bytes` are not allowed (0: no limit),
    and the rest is divided by `weight` (0: not said, and the policy decides alone unless another tenant says one)."""

    min_bytes: int = 0
    max_bytes: int = 0
    weight: int = 0


NO_SHARE = TierShare()


@dataclass(frozen=True)
class TenantSection:
    """The settings of one tenant in the configuration. `shares` has, by name of tier, the shares that are not the
    default. `remote` says whether its blocks are encrypted in remote tiers; "" leaves the decision to the tier's
    setting."""

    name: str
    uids: tuple[int, ...] = ()
    gids: tuple[int, ...] = ()
    shares: tuple[tuple[str, TierShare], ...] = ()
    durability: str = ""
    put_in_place: bool | None = None  # None: as [put] says
    remote: str = ""  # "": as the tier says
    unmapped: bool = False  # whether users that the daemon's user namespace does not map are this tenant
    ttl_s: int = 0  # of new blocks, unless their put says otherwise; 0: they do not expire
    priority: int = 0  # likewise
    lossy: bool = False  # whether clients that accept lossy copies may put and get them
    encrypt: bool | None = None  # its blocks at rest; None: as [encryption] says
    cgroups: tuple[str, ...] = ()  # callers in or below one of these are this tenant
    socket: bool = False  # whether it has a handshake socket of its own, whose callers are this tenant
    certificates: tuple[str, ...] = ()  # names of a client certificate that are this tenant over TCP: "dns:a.example"
    publisher: str = ""  # of a shared pool: the tenant that may put blocks into it
    readers: tuple[str, ...] = ()  # of a shared pool: the tenants that may get its blocks

    @property
    def is_pool(self) -> bool:
        """True for a shared pool: no caller is this tenant, and callers of the tenants that it lists use its blocks."""
        return bool(self.publisher)

    def share(self, tier: str) -> TierShare:
        """Return the tenant's share of the tier with the name `tier`."""
        return dict(self.shares).get(tier, NO_SHARE)


class ConfiguredSetting(NamedTuple):
    """A setting with its origin. `value` is the value as TOML reads it; `origin` is "default", "--set", the file's path
    or "kvctl tenants set". For a setting of a `[[tenant]]`, `section` is "tenant" and `tenant` its name; for a tier's
    setting, `section` is the tier's name."""

    section: str
    key: str
    value: Any
    origin: str
    tenant: str = ""

    @property
    def name(self) -> str:
        return ".".join(filter(None, (self.section, self.tenant, self.key)))


@dataclass(frozen=True)
class Config:
    """The configuration of a daemon. `listed` has all tiers, fastest first, also disabled ones. `written` has every
    setting with its origin, in the order of the reference file, tenants last."""

    daemon: DaemonSection
    listed: tuple[TierSection, ...]
    durability: DurabilitySection
    put: PutSection
    limits: LimitsSection
    movement: MovementSection
    prefetch: PrefetchSection
    scrub: ScrubSection
    index: IndexSection
    unary: UnarySection
    metrics: MetricsSection
    traces: TracesSection
    events: EventsSection
    cluster: ClusterSection
    encryption: EncryptionSection
    tenant_default: str
    tenants: tuple[TenantSection, ...]
    source: str
    written: tuple[ConfiguredSetting, ...] = ()

    @property
    def tiers(self) -> tuple[TierSection, ...]:
        """The tiers that are enabled, fastest first."""
        return tuple(tier for tier in self.listed if tier.enabled)

    @property
    def host(self) -> SharedSection:
        """The settings of the tier that clients map."""
        return next(tier for tier in self.listed if isinstance(tier, SharedSection))

    @property
    def nvme(self) -> NvmeSection:
        """The settings of the durable tier, which may be disabled."""
        return next(tier for tier in self.listed if isinstance(tier, NvmeSection))

    def tier(self, name: str) -> TierSection | None:
        return next((tier for tier in self.listed if tier.name == name), None)

    def fields(self) -> Iterator[tuple[str, str, Any]]:
        """Yield section name, field name and value of every setting, tiers included."""
        for name, section in vars(self).items():
            sections = [(tier.name, tier) for tier in self.listed] if name == "listed" else [(name, section)]
            for title, each in sections:
                if is_dataclass(each):
                    yield from ((title, field, value) for field, value in vars(each).items())

    def with_tier(self, name: str, **changes: Any) -> Self:
        """Return a copy of this configuration in which the tier `name` has the settings `changes`."""
        listed = (replace(tier, **changes) if tier.name == name else tier for tier in self.listed)
        return replace(self, listed=tuple(listed))
