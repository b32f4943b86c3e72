"""Settings that are each possible and together make no sense. Raises nothing but ConfigError; touches no file."""

from __future__ import annotations

from kvstore_console.units import human_bytes
from kvstored.config.mistakes import ConfigError
from kvstored.config.schema import Config


def check_plausible(config: Config, staging_bytes: int) -> None:
    """`staging_bytes`: what the operator asked for, 0 where that is the default."""
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
    room_bytes = config.host.capacity_bytes - config.host.staging_bytes
    for tenant in config.tenants:
        if tenant.host_max_bytes and tenant.host_max_bytes < tenant.host_min_bytes:
            raise ConfigError(
                f"tenant {tenant.name}: host_max {human_bytes(tenant.host_max_bytes)} is below its host_min "
                f"{human_bytes(tenant.host_min_bytes)}; raise the one or lower the other"
            )
    least_bytes = sum(tenant.host_min_bytes for tenant in config.tenants)
    if least_bytes > room_bytes:
        raise ConfigError(
            f"the tenants' host_min are {human_bytes(least_bytes)} together, host.capacity less staging is "
            f"{human_bytes(room_bytes)}: lower them, or raise host.capacity"
        )
