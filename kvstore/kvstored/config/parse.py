"""Make a Config from TOML: reference.toml, then the operator's file, then `--set section.key=value`, checked as a
whole.

Unknown keys are errors with a suggestion. The module only reads the file, and asks for the sizes of the machine's
memory and of the NVMe file system.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from kvstore_console.units import human_bytes, parse_size
from kvstore_proto.terms import PRIORITY_MAX, PRIORITY_MIN, TTL_MAX_S
from kvstore_proto.version import pip_install
from kvstored.config.addresses import address_of
from kvstored.config.documents import (
    TENANT,
    configured_settings,
    in_order,
    lay_over,
    names_in,
    read_file,
    read_override,
    read_reference,
    tiers_in,
)
from kvstored.config.events import check_events
from kvstored.config.mistakes import ConfigError, did_you_mean, need, need_within, one_of
from kvstored.config.recognition import RECOGNITION_KEYS, check_recognition, recognition
from kvstored.config.schema import (
    Config,
    ConfiguredSetting,
    PrefetchSection,
    TenantSection,
    TierShare,
    TracesSection,
    UnarySection,
)
from kvstored.config.section_fields import section_of, size
from kvstored.config.tiers import KINDS, MachineSizes
from kvstored.config.tiers.remote import MODES
from kvstored.predictor_names import LEARNED, PREDICTORS

Table = dict[str, Any]
MAX_BLOCK_BYTES = 2 << 30  # the residency index keeps a slot's size in 32 bits
MAX_INDEX_SLOTS = 100_000_000  # 1 GiB of buckets
MIN_UNARY_MESSAGE_BYTES, MAX_UNARY_MESSAGE_BYTES = 64 << 10, 1 << 30
HORIZON_MAX_S = 86_400
MAX_WAITING_SPANS = 1_000_000
DURABILITY_MODES = ("none", "batch", "always")
LOG_LEVELS = ("debug", "info", "warning", "error")
_SECTIONS: dict[str, Any] = {name: kind for name, kind in get_type_hints(Config).items() if is_dataclass(kind)}
_TENANT_KEYS = {
    "name", "uids", "gids", "durability", "put_in_place", "remote", "unmapped", "ttl_s", "priority", "lossy", "encrypt",
    *RECOGNITION_KEYS,
}  # fmt: skip
ORDERED_KEYS = ("ttl_s", "priority")  # of a tenant, beside its shares, that an operator may set while the daemon runs
WEIGHT_MAX = 1000
ORDERED = "kvctl tenants set"
_TENANT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_UID_TENANT = re.compile(r"uid-\d+\Z")  # what tenants.default = "by-uid" calls users that no tenant lists


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Return the configuration: the defaults, then the file `path` if it is not None, then `overrides`
    ("section.key=value"). Raises ConfigError with one line that names the key.
    """
    reference = read_reference()
    merged = copy.deepcopy(reference)
    origins: dict[tuple[str, str], str] = {}
    source = "defaults" if path is None else str(path)
    if path is not None:
        sections = read_file(path, merged)
        lay_over(merged, sections, reference, source)
        origins = dict.fromkeys(names_in(sections), source)
    for override in overrides:
        sections = read_override(override, merged)
        lay_over(merged, sections, reference, f"--set {override}")
        origins |= dict.fromkeys(names_in(sections), "--set")
    is_our_staging = merged["host"]["staging"] == reference["host"]["staging"]
    return replace(
        _build(merged, source, is_our_staging), written=tuple(configured_settings(in_order(merged), origins))
    )


def _build(raw: Table, source: str, is_our_staging: bool) -> Config:
    sections: Table = {name: section_of(kind, name, raw[name]) for name, kind in _SECTIONS.items()}
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine = MachineSizes(memory_bytes, sections["daemon"].state_dir)
    config = Config(
        **sections,
        listed=tuple(KINDS[table["kind"]].read(name, table, machine) for name, table in tiers_in(raw).items()),
        tenant_default=raw["tenants"]["default"],
        tenants=(),
        source=source,
    )
    config = replace(config, tenants=tenant_sections(raw[TENANT], config))
    for tier in config.listed:
        tier.check(machine)
    _check(config)
    check_plausible(config, 0 if is_our_staging else size("host", raw["host"], "staging"))
    return config


def _check_unary(unary: UnarySection) -> None:
    need(unary.connections > 0, "unary.connections must be more than 0")
    need(unary.calls > 0, "unary.calls must be more than 0; to have no unary calls set unary.enabled = false")
    need(
        MIN_UNARY_MESSAGE_BYTES <= unary.message_bytes <= MAX_UNARY_MESSAGE_BYTES,
        f"unary.message must be {human_bytes(MIN_UNARY_MESSAGE_BYTES)} to {human_bytes(MAX_UNARY_MESSAGE_BYTES)}, "
        f"got {human_bytes(unary.message_bytes)}",
    )
    if unary.listen:
        address_of("unary.listen", unary.listen, "127.0.0.1:7443")
        need(unary.enabled, "unary.listen is set, but unary.enabled = false: set one of them right")
        need(
            unary.tokens_file is not None or unary.tls_client_ca is not None,
            "unary.listen needs unary.tokens_file or unary.tls_client_ca: without tokens or certificates any client at "
            "the port could read every block",
        )
    need(
        (unary.tls_cert is None) == (unary.tls_key is None),
        "unary.tls_cert and unary.tls_key belong together: set both or none",
    )
    need(unary.tls_cert is None or bool(unary.listen), "unary.tls_cert does nothing without unary.listen")
    need(
        unary.tls_client_ca is None or unary.tls_cert is not None,
        "unary.tls_client_ca checks clients' certificates over TLS: set unary.tls_cert and unary.tls_key too",
    )


def _check_traces(traces: TracesSection) -> None:
    parts = urlsplit(traces.endpoint)
    need(
        not traces.endpoint or (parts.scheme in ("http", "https") and bool(parts.hostname)),
        f'traces.endpoint {traces.endpoint!r} is no URL of a collector: write "http://127.0.0.1:4318", for instance',
    )
    need_within("traces.sample", traces.sample, 0, 1)
    need_within("traces.queue", traces.queue, 1, MAX_WAITING_SPANS)


def _check_prefetch(prefetch: PrefetchSection) -> None:
    one_of("prefetch.predictor", prefetch.predictor, tuple(PREDICTORS))
    need(
        (prefetch.model is not None) == (prefetch.predictor == LEARNED),
        f'prefetch.model is the file that predictor "{LEARNED}" is made with, by kvstored predictor train: set both or '
        "none",
    )
    need(
        0 < prefetch.horizon_s <= HORIZON_MAX_S,
        f"prefetch.horizon_s must be more than 0 and at most {HORIZON_MAX_S}, got {prefetch.horizon_s}",
    )
    for name in ("min_probability", "waste_limit"):
        need_within(f"prefetch.{name}", getattr(prefetch, name), 0, 1)


def _check_encryption(config: Config) -> None:
    encryption = config.encryption
    needed_by = encryption.needed_by(config.tenants)
    need(
        not needed_by or encryption.key_file is not None,
        f"{needed_by} = true needs a master key: head -c 32 /dev/urandom | base64 > FILE, chmod 600 FILE, and set "
        "encryption.key_file to it",
    )
    need(
        encryption.key_file is not None or encryption.former_key_file is None,
        "encryption.former_key_file does nothing without encryption.key_file",
    )
    need(
        encryption.key_file is None or find_spec("cryptography") is not None,
        f"encryption.key_file needs more packages: {pip_install('encryption')}",
    )


def _check(config: Config) -> None:
    _check_unary(config.unary)
    if config.metrics.listen:
        address_of("metrics.listen", config.metrics.listen, "127.0.0.1:9464")
    need(config.metrics.connections > 0, "metrics.connections must be more than 0")
    _check_traces(config.traces)
    check_events(config.events)
    limits = config.limits
    one_of("daemon.log_level", config.daemon.log_level, LOG_LEVELS)
    need_within("daemon.nice", config.daemon.nice, -20, 19)
    need(config.scrub.rate_bytes >= 1 << 16, "scrub.rate must be at least 64KiB; scrub.enabled = false turns it off")
    for name, seconds in vars(config.scrub).items():
        if name.endswith("_s"):
            need(math.isfinite(seconds) and seconds >= 0, f"scrub.{name} must be a number of seconds, got {seconds}")
    need(config.scrub.interval_s >= 0.1, "scrub.interval_s must be at least 0.1; scrub.enabled = false turns it off")
    one_of("durability.mode", config.durability.mode, DURABILITY_MODES)
    one_of("tenants.default", config.tenant_default, ("by-uid", "refuse"))
    for tenant in config.tenants:
        need(
            not tenant.certificates or config.unary.tls_client_ca is not None,
            f"tenant {tenant.name}: certificates are those of callers over TCP: set unary.tls_client_ca",
        )
        one_of(f"tenant {tenant.name}: durability", tenant.durability, ("", *DURABILITY_MODES))
        one_of(f"tenant {tenant.name}: remote", tenant.remote, ("", *MODES))
    need(
        limits.max_block_bytes <= MAX_BLOCK_BYTES,
        f"limits.max_block {human_bytes(limits.max_block_bytes)} is over {human_bytes(MAX_BLOCK_BYTES)}",
    )
    for name, value in vars(limits).items():
        need(value > 0, f"limits.{name.removesuffix('_bytes')} must be more than 0")
    need(limits.max_keys <= 65536, "limits.max_keys must be at most 65536")
    for name in ("in_flight", "queue_blocks", "acquire_wait_ms"):
        need(getattr(config.movement, name) > 0, f"movement.{name} must be more than 0")
    need(config.movement.prefetch_quiet_ms >= 0, "movement.prefetch_quiet_ms must not be negative")
    _check_prefetch(config.prefetch)
    _check_encryption(config)
    need_within("index.slots", config.index.slots, 0, MAX_INDEX_SLOTS)
    for name, value in (("batch_ms", config.durability.batch_ms), ("batch_blocks", config.durability.batch_blocks)):
        need(value > 0, f"durability.{name} must be more than 0")


def check_plausible(config: Config, staging_bytes: int) -> None:
    """Check that settings of different sections fit together. `staging_bytes` is the size of staging memory that the
    operator has set, 0 if it is the default. Raises ConfigError."""
    host = config.host
    if staging_bytes > host.capacity_bytes // 2:
        raise ConfigError(
            f"host.staging {human_bytes(staging_bytes)} leaves too little of host.capacity "
            f"{human_bytes(host.capacity_bytes)} for blocks; set at most a quarter of it, or leave it out"
        )
    _check_shares(config)
    _check_in_place(config)


def _check_in_place(config: Config) -> None:
    if not config.host.sealed:
        return
    allowed = [tenant.name for tenant in config.tenants if tenant.put_in_place]
    if config.put.in_place or allowed:
        name = "put.in_place" if config.put.in_place else f"tenant {allowed[0]}: put_in_place"
        raise ConfigError(f"{name}: no client can write to sealed arenas; set host.sealed = false, or leave it out")


def _check_shares(config: Config) -> None:
    for tier in config.listed:
        least_bytes, room_bytes = 0, tier.capacity_bytes - (config.host.staging_bytes if tier is config.host else 0)
        for tenant in config.tenants:
            share = tenant.share(tier.name)
            least_bytes += share.min_bytes
            if share.max_bytes and share.max_bytes < share.min_bytes:
                raise ConfigError(
                    f"tenant {tenant.name}: {tier.name}_max {human_bytes(share.max_bytes)} is below its "
                    f"{tier.name}_min {human_bytes(share.min_bytes)}; raise the one or lower the other"
                )
        if least_bytes > room_bytes:
            less = " less staging" * (tier is config.host)
            raise ConfigError(
                f"the tenants' {tier.name}_min are {human_bytes(least_bytes)} together, {tier.name}.capacity{less} is "
                f"{human_bytes(room_bytes)}: lower them, or raise {tier.name}.capacity"
            )


def share_keys(config: Config) -> dict[str, tuple[str, str]]:
    """Return the keys of a tenant's shares, such as "host_min", each with its tier's name and what it sets there."""
    tiers = [tier.name for tier in config.listed if tier.KIND != "remote"]
    return {f"{tier}_{what}": (tier, what) for tier in tiers for what in ("min", "max", "weight")}


def _shares(entry: dict[str, Any], config: Config) -> tuple[tuple[str, TierShare], ...]:
    found: dict[str, TierShare] = {}
    for key, (tier, what) in share_keys(config).items():
        if key in entry:
            section = config.tier(tier)
            assert section is not None
            if what == "weight":
                change = {"weight": _number(entry, key, 0, WEIGHT_MAX)}
            else:
                change = {f"{what}_bytes": parse_size(entry[key], section.capacity_bytes)}
            found[tier] = replace(found.get(tier, TierShare()), **change)
    return tuple((tier, share) for tier, share in sorted(found.items()) if share != TierShare())


def with_orders(config: Config, orders: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return `config` with the settings of tenants that an operator has set in `orders`, by tenant, in place of those
    in the file. Orders for tenants that do not exist now are left out. Raises ConfigError."""
    entries: dict[str, Table] = {}
    for each in config.written:
        if each.section == TENANT and each.origin != ORDERED:
            entries.setdefault(each.tenant, {})[each.key] = each.value
    listed = {uid for entry in entries.values() for uid in entry.get("uids", ())}
    for name in orders:
        uid = int(name[4:]) if _UID_TENANT.match(name) else -1
        if uid >= 0 and uid not in listed and config.tenant_default == "by-uid":
            entries[name] = {"name": name, "uids": [uid]}
    ordered = {name: order for name, order in orders.items() if name in entries}
    raw = [entry | dict(ordered.get(name, {})) for name, entry in entries.items()]
    changed = replace(config, tenants=tenant_sections(raw, config, ordered))
    _check_shares(changed)
    written = [each for each in config.written if each.origin != ORDERED]  # of two of one name the last is in force
    for name, order in ordered.items():
        written += [ConfiguredSetting(TENANT, key, value, ORDERED, name) for key, value in order.items()]
    return replace(changed, written=tuple(written))


def tenant_sections(raw: Any, config: Config, ordered: Container[str] = ()) -> tuple[TenantSection, ...]:
    """Return the tenants' sections from `raw`, the TOML value of [[tenant]]. Percentages in it are of the tiers'
    capacities in `config`. A tenant in `ordered` may have the name of a user whom none lists. Raises ConfigError."""
    if not isinstance(raw, list):
        raise ConfigError("tenant: write each one as [[tenant]]")
    known, found = _TENANT_KEYS | share_keys(config).keys(), dict[str, TenantSection]()
    owners: dict[str, str] = {}  # "uids 1001" -> the tenant that lists it
    for entry in raw:
        if not isinstance(entry, dict):
            raise ConfigError("tenant: write each one as [[tenant]]")
        unknown = set(entry) - known
        if unknown:
            key = sorted(unknown)[0]
            raise ConfigError(f"unknown key tenant.{key}{did_you_mean(key, known)}")
        name = entry.get("name", "")
        if not isinstance(name, str) or not _TENANT_NAME.match(name):
            raise ConfigError(f"tenant.name {name!r}: 1 to 64 letters, digits, '_', '.', '-'")
        if name in found:
            raise ConfigError(f"tenant {name!r} is listed twice")
        if _UID_TENANT.match(name) and name not in ordered:
            raise ConfigError(f"tenant.name {name!r} is kept for a user that no tenant lists; choose another name")
        ids = {key: _ids(name, key, entry.get(key, [])) for key in ("uids", "gids")}
        for member in (f"{key} {number}" for key in ids for number in ids[key]):
            if owners.setdefault(member, name) != name:
                raise ConfigError(f"tenant {name}: {member} is listed by tenant {owners[member]} already")
        try:
            found[name] = TenantSection(
                name,
                ids["uids"],
                ids["gids"],
                _shares(entry, config),
                entry.get("durability", ""),
                _flag(entry, "put_in_place"),
                entry.get("remote", ""),
                bool(_flag(entry, "unmapped")),
                _number(entry, "ttl_s", 0, TTL_MAX_S),
                _number(entry, "priority", PRIORITY_MIN, PRIORITY_MAX),
                bool(_flag(entry, "lossy")),
                encrypt=_flag(entry, "encrypt"),
                **recognition(entry),
            )
        except (ValueError, TypeError) as error:
            raise ConfigError(f"tenant {name}: {error}") from None
        if found[name].unmapped and owners.setdefault("unmapped", name) != name:
            raise ConfigError(f"tenant {name}: unmapped users are tenant {owners['unmapped']} already")
    check_recognition(tuple(found.values()))
    return tuple(found.values())


def _flag(entry: dict[str, Any], key: str) -> bool | None:
    value = entry.get(key)
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"{key} must be true or false, got {value!r}")
    return value


def _number(entry: dict[str, Any], key: str, least: int, most: int) -> int:
    value = entry.get(key, 0)
    if type(value) is not int or not least <= value <= most:
        raise TypeError(f"{key} must be a whole number from {least} to {most}, got {value!r}")
    return value


def _ids(tenant: str, key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise ConfigError(f"tenant {tenant}: {key} must be a list of numeric ids such as [1001], got {value!r}")
    return tuple(value)
