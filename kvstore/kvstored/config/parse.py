"""From TOML to Config: reference.toml, then the operator's file, then `--set section.key=value`, checked as a whole.

Unknown keys are errors with a suggestion. Never does: touch the file system beyond reading the file and asking how
large the machine's memory and the NVMe file system are.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvstored.config.plausible import check_plausible
from kvstored.config.schema import (
    Config,
    ConfigError,
    DaemonSection,
    DurabilitySection,
    HostSection,
    IndexSection,
    LimitsSection,
    MovementSection,
    NvmeSection,
    PutSection,
    ScrubSection,
    UnarySection,
)
from kvstored.config.sizes import is_size_text, parse_size, show_size
from kvstored.config.tenant_sections import tenant_sections
from kvstored.config.tier_sections import memory_sections
from kvstored.config.unknown import did_you_mean
from kvstored.config.written import LISTS, names_in, written
from kvstored.policy_names import ADMISSIONS, POLICIES, WITH_WORTH

Table = dict[str, Any]
MAX_BLOCK_BYTES = 2 << 30  # the residency index keeps a slot's size in 32 bits
MIN_ENDURANCE_BYTES = 1 << 20
AUTO, AUTO_CONTAINERS = "auto", 32
MIN_CONTAINER_BYTES, MIN_AUTO_CONTAINER_BYTES = 1 << 20, 16 << 20
MAX_AUTO_ARENA_BYTES, MAX_AUTO_SLAB_BYTES = 64 << 20, 256 << 20
MAX_INDEX_SLOTS = 100_000_000  # 1 GiB of buckets
MIN_UNARY_MESSAGE_BYTES, MAX_UNARY_MESSAGE_BYTES = 64 << 10, 1 << 30
_LISTEN = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):(\d{1,5})\Z")
DURABILITY_MODES = ("none", "batch", "always")
WARM_RESTARTS = ("auto", "systemd", "holder", "off")
LOG_LEVELS = ("debug", "info", "warning", "error")
VERIFY_READS = ("off", "first", "always")


def reference_text() -> str:
    return resources.files("kvstored.config").joinpath("reference.toml").read_text()


def load_config(path: Path | None, overrides: Iterable[str] = ()) -> Config:
    """Raises ConfigError with one line that names the key."""
    merged = tomllib.loads(reference_text())
    for name in LISTS:
        merged.setdefault(name, [])
    our_staging = merged["host"]["staging"]
    origins: dict[tuple[str, str], str] = {}
    source = "defaults"
    if path is not None:
        source = str(path)
        table = _read(path)
        _merge(merged, table, source)
        origins = dict.fromkeys(names_in(table), source)
    for override in overrides:
        table = _parse_override(override)
        if "tier" in table:
            table["tier"] = _with_override(merged["tier"], table["tier"][0])
        _merge(merged, table, f"--set {override}")
        origins |= dict.fromkeys(names_in(table), "--set")
    return replace(_build(merged, source, our_staging), written=tuple(written(merged, origins)))


def _read(path: Path) -> Table:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def _parse_override(text: str) -> Table:
    name, equals, value = text.partition("=")
    section, dot, key = name.strip().partition(".")
    tier, of_tier, tier_key = key.partition(".")
    if not (equals and dot) or (section == "tier") != bool(of_tier):
        raise ConfigError(
            f"--set {text}: write section.key=value, for instance host.capacity=4GiB, or tier.NAME.key=value"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    return {section: {key: parsed}} if not of_tier else {section: [{"name": tier, tier_key: parsed}]}


def _with_override(tiers: Any, override: Table) -> list[Any]:
    """The `[[tier]]` tables with one setting of one of them replaced; a tier that is not listed comes last."""
    listed = list(tiers) if isinstance(tiers, list) else []
    for at, each in enumerate(listed):
        if isinstance(each, dict) and each.get("name") == override["name"]:
            listed[at] = {**each, **override}
            return listed
    return [*listed, override]


def _merge(into: Table, other: Table, source: str) -> None:
    for section, table in other.items():
        if section in LISTS:
            into[section] = table
            continue
        if section not in into:
            raise ConfigError(f"{source}: unknown section [{section}]{did_you_mean(section, into)}")
        if not isinstance(table, dict):
            raise ConfigError(f"{source}: {section} is a section: write [{section}] and its keys below it")
        for key, value in table.items():
            if key not in into[section]:
                hint = did_you_mean(key, into[section])
                raise ConfigError(f"{source}: unknown key {section}.{key}{hint}")
            _check_type(f"{source}: {section}.{key}", into[section][key], value)
            into[section][key] = value


def _check_type(name: str, default: Any, value: Any) -> None:
    wanted = type(default)
    fits = isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool))
    is_size = (
        wanted is str
        and (default == AUTO or is_size_text(default))
        and isinstance(value, int)
        and not isinstance(value, bool)
    )
    is_number = name.endswith(("_s", "_worth")) and isinstance(value, float)
    if not (fits or is_size or is_number):
        raise ConfigError(f"{name} must be {wanted.__name__}, got {value!r}")


def _build(raw: Table, source: str, our_staging: str) -> Config:
    def size(section: str, key: str, whole_bytes: int = 0) -> int:
        try:
            return parse_size(raw[section][key], whole_bytes)
        except ValueError as error:
            raise ConfigError(f"{section}.{key}: {error}") from None

    def container(section: str, key: str, capacity_bytes: int, most_bytes: int) -> int:
        if raw[section][key] != AUTO:
            return size(section, key)
        return auto_container(capacity_bytes, most_bytes)

    def arena(value: Any, capacity_bytes: int) -> int:
        return auto_container(capacity_bytes, MAX_AUTO_ARENA_BYTES) if value == AUTO else parse_size(value)

    def auto_container(capacity_bytes: int, most_bytes: int) -> int:
        """An arena or slab: `auto` is small enough that a block of a new size takes little of the tier."""
        least_bytes = min(MIN_AUTO_CONTAINER_BYTES, capacity_bytes // 8)  # large blocks fill small containers badly
        chosen_bytes = max(least_bytes, min(most_bytes, capacity_bytes // AUTO_CONTAINERS))
        return max(MIN_CONTAINER_BYTES, chosen_bytes & -MIN_CONTAINER_BYTES)

    daemon, host, nvme = raw["daemon"], raw["host"], raw["nvme"]
    limits, movement, scrub = raw["limits"], raw["movement"], raw["scrub"]
    state_dir = Path(daemon["state_dir"]).absolute()
    nvme_path = Path(nvme["path"]).absolute() if nvme["path"] else state_dir / "nvme"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host_bytes = size("host", "capacity", memory_bytes)
    disk_bytes = _file_system_bytes(nvme_path)
    nvme_bytes = size("nvme", "capacity", disk_bytes)
    config = Config(
        daemon=DaemonSection(
            Path(daemon["socket_dir"]).absolute(), daemon["socket_group"], daemon["admin_group"], state_dir,
            Path(daemon["record"]).absolute() if daemon["record"] else None, daemon["log_level"],
            daemon["nice"],
        ),
        host=HostSection(
            host_bytes, min(size("host", "staging"), host_bytes // 4),
            container("host", "arena", host_bytes, MAX_AUTO_ARENA_BYTES),
            host["sealed"], host["prefault"],
            size("host", "prefault_ahead"), host["copy_threads"], host["verify_reads"],
            size("host", "min_free", memory_bytes), host["policy"], host["ttl_s"],
            float(host["keep_worth"]),
            host["warm_restart"], host["warm_linger_s"],
        ),
        memory=memory_sections(raw["tier"], memory_bytes, arena),
        nvme=NvmeSection(
            nvme["enabled"], nvme_path, nvme_bytes,
            container("nvme", "slab", nvme_bytes, MAX_AUTO_SLAB_BYTES),
            nvme["io_threads"], nvme["require_direct"], nvme["policy"], nvme["ttl_s"],
            nvme["admission"], nvme["quarantine_slots"], size("nvme", "endurance_bytes_per_day"),
            nvme["endurance_wait_ms"],
        ),
        durability=DurabilitySection(**raw["durability"]),
        put=PutSection(**raw["put"]),
        limits=LimitsSection(
            limits["max_clients"], limits["max_keys"], size("limits", "max_block"),
            size("limits", "staging_per_client"), limits["inflight_per_client"], limits["leases_per_client"],
            limits["lease_ttl_ms"], size("limits", "limbo_per_tenant"),
            size("limits", "message"), limits["ghosts_per_tenant"], limits["misses_per_tenant"],
        ),
        movement=MovementSection(
            movement["acquire_wait_ms"], movement["queue_blocks"], movement["in_flight"],
            size("movement", "prefetch_budget"), movement["prefetch_quiet_ms"], size("movement", "demotion_rate"),
        ),
        scrub=ScrubSection(
            scrub["enabled"], size("scrub", "rate"), scrub["interval_s"], scrub["start_s"], scrub["books_s"]
        ),
        index=IndexSection(**raw["index"]),
        unary=_unary(raw["unary"], size("unary", "message")),
        tenant_default=raw["tenants"]["default"],
        tenants=(),
        source=source,
    )  # fmt: skip
    config = replace(config, tenants=tenant_sections(raw["tenant"], config))
    _check(config, memory_bytes)
    is_ours = raw["host"]["staging"] == our_staging
    check_plausible(config, 0 if is_ours else size("host", "staging"), disk_bytes)
    return config


def _unary(raw: Table, message_bytes: int) -> UnarySection:
    paths = (Path(raw[key]).absolute() if raw[key] else None for key in ("tokens_file", "tls_cert", "tls_key"))
    return UnarySection(raw["enabled"], message_bytes, raw["calls"], raw["listen"], *paths)


def _file_system_bytes(path: Path) -> int:
    for candidate in (path, *path.parents):
        try:
            stat = os.statvfs(candidate)
        except OSError:
            continue
        return stat.f_frsize * stat.f_blocks
    return 0


def _check_unary(unary: UnarySection) -> None:
    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    need(unary.calls > 0, "unary.calls must be more than 0; to have no unary calls set unary.enabled = false")
    need(
        MIN_UNARY_MESSAGE_BYTES <= unary.message_bytes <= MAX_UNARY_MESSAGE_BYTES,
        f"unary.message must be {show_size(MIN_UNARY_MESSAGE_BYTES)} to {show_size(MAX_UNARY_MESSAGE_BYTES)}, "
        f"got {show_size(unary.message_bytes)}",
    )
    if unary.listen:
        address = _LISTEN.match(unary.listen)
        need(
            address is not None and 0 < int(address[2]) < 65536,
            f'unary.listen {unary.listen!r} is no address: write "host:port", for instance "127.0.0.1:7443"',
        )
        need(unary.enabled, "unary.listen is set, but unary.enabled = false: set one of them right")
        need(
            unary.tokens_file is not None,
            "unary.listen needs unary.tokens_file: without tokens anybody who reaches the port could read every block",
        )
    need(
        (unary.tls_cert is None) == (unary.tls_key is None),
        "unary.tls_cert and unary.tls_key belong together: set both or none",
    )
    need(unary.tls_cert is None or bool(unary.listen), "unary.tls_cert does nothing without unary.listen")


def _check(config: Config, memory_bytes: int) -> None:
    _check_unary(config.unary)
    host, nvme, limits = config.host, config.nvme, config.limits

    def need(ok: bool, message: str) -> None:
        if not ok:
            raise ConfigError(message)

    def one_of(name: str, value: str, known: Iterable[str]) -> None:
        need(value in known, f"{name}: {value!r} is unknown; known: {', '.join(known)}")

    need(
        host.capacity_bytes <= memory_bytes,
        f"host.capacity {show_size(host.capacity_bytes)} is more than this machine's memory, {show_size(memory_bytes)}",
    )
    need(host.arena_bytes >= MIN_CONTAINER_BYTES, "host.arena must be at least 1MiB")
    need(1 <= host.copy_threads <= 64, "host.copy_threads must be 1..64")
    need(1 <= nvme.io_threads <= 64, "nvme.io_threads must be 1..64")
    if nvme.enabled:
        need(nvme.slab_bytes >= MIN_CONTAINER_BYTES, "nvme.slab must be at least 1MiB")
        need(
            nvme.capacity_bytes >= nvme.slab_bytes,
            f"nvme.capacity {show_size(nvme.capacity_bytes)} does not hold one slab of "
            f"{show_size(nvme.slab_bytes)}; lower nvme.slab, or set nvme.enabled = false",
        )
    need(nvme.endurance_wait_ms >= 0, "nvme.endurance_wait_ms must not be negative")
    need(
        host.min_free_bytes < memory_bytes,
        f"host.min_free {show_size(host.min_free_bytes)} leaves nothing of this machine's memory, "
        f"{show_size(memory_bytes)}",
    )
    need(
        not nvme.enabled or not 0 < nvme.endurance_bytes_per_day < MIN_ENDURANCE_BYTES,
        f"nvme.endurance_bytes_per_day must be 0 (no limit) or at least {show_size(MIN_ENDURANCE_BYTES)}",
    )
    one_of("daemon.log_level", config.daemon.log_level, LOG_LEVELS)
    need(-20 <= config.daemon.nice <= 19, f"daemon.nice must be from -20 to 19, got {config.daemon.nice}")
    one_of("host.policy", host.policy, POLICIES)
    one_of("host.warm_restart", host.warm_restart, WARM_RESTARTS)
    need(
        math.isfinite(host.warm_linger_s) and host.warm_linger_s >= 0,
        f"host.warm_linger_s must be a number of seconds, got {host.warm_linger_s}",
    )
    one_of("nvme.policy", nvme.policy, POLICIES)
    one_of("nvme.admission", nvme.admission, ADMISSIONS)
    one_of("host.verify_reads", host.verify_reads, VERIFY_READS)
    need(0 <= nvme.quarantine_slots <= 65536, "nvme.quarantine_slots must be 0 (none is kept) to 65536")
    need(config.scrub.rate_bytes >= 1 << 16, "scrub.rate must be at least 64KiB; scrub.enabled = false turns it off")
    for name, seconds in vars(config.scrub).items():
        if name.endswith("_s"):
            need(math.isfinite(seconds) and seconds >= 0, f"scrub.{name} must be a number of seconds, got {seconds}")
    one_of("durability.mode", config.durability.mode, DURABILITY_MODES)
    one_of("tenants.default", config.tenant_default, ("by-uid", "refuse"))
    for tenant in config.tenants:
        one_of(f"tenant {tenant.name}: durability", tenant.durability, ("", *DURABILITY_MODES))
    need(
        host.capacity_bytes - host.staging_bytes >= host.arena_bytes,
        f"host.capacity {show_size(host.capacity_bytes)} less staging {show_size(host.staging_bytes)} does not hold "
        f"one arena of {show_size(host.arena_bytes)}; lower host.arena",
    )
    need(host.staging_bytes >= 1 << 20, "host.staging must be at least 1MiB")
    _check_times_to_live(host, nvme)
    need(
        limits.max_block_bytes <= MAX_BLOCK_BYTES,
        f"limits.max_block {show_size(limits.max_block_bytes)} is over {show_size(MAX_BLOCK_BYTES)}",
    )
    for name, value in vars(limits).items():
        need(value > 0, f"limits.{name.removesuffix('_bytes')} must be more than 0")
    need(limits.max_keys <= 65536, "limits.max_keys must be at most 65536")
    for name in ("in_flight", "queue_blocks", "acquire_wait_ms"):
        need(getattr(config.movement, name) > 0, f"movement.{name} must be more than 0")
    need(config.movement.prefetch_quiet_ms >= 0, "movement.prefetch_quiet_ms must not be negative")
    need(0 <= config.index.slots <= MAX_INDEX_SLOTS, f"index.slots must be 0 (no index) to {MAX_INDEX_SLOTS}")
    for name, value in (("batch_ms", config.durability.batch_ms), ("batch_blocks", config.durability.batch_blocks)):
        need(value > 0, f"durability.{name} must be more than 0")


def _check_times_to_live(host: HostSection, nvme: NvmeSection) -> None:
    for name, value, unit in (
        ("host.ttl_s", host.ttl_s, "seconds"),
        ("nvme.ttl_s", nvme.ttl_s, "seconds"),
        ("host.keep_worth", host.keep_worth, "uses an hour"),
    ):
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"{name} must be 0 (never) or a number of {unit}, got {value}")
    if host.keep_worth and host.policy not in WITH_WORTH:
        raise ConfigError(
            f"host.keep_worth means nothing to host.policy {host.policy}, which has no worth: set host.policy to "
            f"{', '.join(WITH_WORTH)}, or host.ttl_s instead"
        )
