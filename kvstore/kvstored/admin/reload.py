"""Reload of the configuration while the daemon serves, at SIGHUP or `kvctl reload`.

The module owns the rules: a configuration that cannot be used changes nothing. Of a usable one, the settings that
`LiveSettings` knows take effect at once, and every other difference is reported as waiting for a restart.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kvstore_console.units import human_bytes
from kvstore_proto.errors import ErrorKind, KVStoreError
from kvstore_proto.v1 import admin_pb2 as pb
from kvstored.admin.live_settings import LiveSettings
from kvstored.config import Config, ConfigError, ConfiguredSetting, TenantSection, with_orders
from kvstored.config.tiers import TierSection
from kvstored.lifetime.notify import notify

log = logging.getLogger(__name__)
ConfiguredSettings = tuple[ConfiguredSetting, ...]
_FOLLOW_CAPACITY = {"staging", "arena", "slab"}  # "auto", or a part of the capacity at most
NEVER_READ = frozenset({"daemon.record"})  # written


class Difference(NamedTuple):
    """A setting that differs between two configurations: its name in the file, and its old and new value as text."""

    name: str
    before: str
    after: str


class Reload:
    """A service that reloads the configuration while the daemon runs. `read()` reads the configuration, and raises
    ConfigError if the configuration cannot be used. `live` applies the settings that can change. `orders()` returns the
    settings of tenants that operators gave the running daemon, which precede the file's."""

    def __init__(
        self,
        config: Config,
        read: Callable[[], Config],
        live: LiveSettings,
        orders: Callable[[], Mapping[str, Mapping[str, Any]]] = dict,
    ) -> None:
        self.config = config  # what is in force
        self.waiting: tuple[Difference, ...] = ()  # what the file says by now, and waits for a restart
        self._read = read
        self._live, self._orders = live, orders
        self._contents = contents_of(config)

    def reload(self) -> pb.ReloadReply:
        """Read the configuration again and apply the settings that can change now. Return the applied settings, and the
        ones that wait for a restart. Raises KVStoreError, having changed nothing, if the configuration cannot be
        used."""
        notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            return self._reload()
        finally:
            notify("READY=1")

    def on_signal(self) -> None:
        """Reload the configuration after a signal; results and errors go to the log."""
        try:
            self.reload()
        except KVStoreError:
            return  # it is in the log

    def check_orders(self, orders: Mapping[str, Mapping[str, Any]]) -> None:
        """Check that the settings `orders` of tenants can be used. Raises ConfigError."""
        with_orders(self.config, orders)

    def apply_orders(self) -> None:
        """Put the settings of tenants in force that operators gave the running daemon. A tenant whose settings cannot
        be used with the present configuration keeps the file's, which is logged."""
        usable: dict[str, Mapping[str, Any]] = {}
        for name, order in self._orders().items():
            try:
                with_orders(self.config, usable | {name: order})
                usable[name] = order
            except ConfigError as error:
                log.warning("settings of kvctl tenants set for %s are not in force: %s", name, error)
        try:
            config = with_orders(self.config, usable)
            if config.tenants != self.config.tenants:
                self._live.apply(config, {"[[tenant]]"})
        except ConfigError as error:
            log.warning("settings of kvctl tenants set are not in force: %s", error)
            return
        self.config = config

    def _reload(self) -> pb.ReloadReply:
        try:
            config = self._with_orders(self._read())
            self._live.prepare(config)
            contents = contents_of(config)
            changed = {each.name: each for each in changed_files(self._contents, contents)}
            changed |= {each.name: each for each in differences(self.config, config)}
            applied = self._live.apply(config, set(changed))
        except ConfigError as error:
            log.error("reload: nothing was changed: %s", error)
            raise KVStoreError(ErrorKind.INVALID, f"nothing was changed: {error}") from None
        reply = pb.ReloadReply(source=config.source)
        for name, each in changed.items():
            listed = reply.applied if name in applied else reply.after_restart
            listed.add(name=name, before=each.before, after=each.after)
            log.info(
                "reload: %s: %s -> %s%s",
                name, each.before, each.after, "" if name in applied else " (after a restart)",
            )  # fmt: skip
        self.waiting = tuple(each for name, each in changed.items() if name not in applied)
        if not changed:
            log.info("reload: the settings are as they were, and the files that they name")
        self._contents |= {name: contents[name] for name in applied & set(contents)}
        self.config = _merged(self.config, config, applied)
        return reply

    def _with_orders(self, config: Config) -> Config:
        orders = self._orders()
        try:
            return with_orders(config, orders)
        except ConfigError as error:
            said = f"kvctl tenants set has settings of {', '.join(sorted(orders))}: reset what contradicts the file"
            raise ConfigError(f"{error} ({said})") from None


def differences(before: Config, after: Config) -> Iterator[Difference]:
    """Yield the settings that differ between two configurations, in the order of the file."""
    kinds, new_kinds = ({tier.name: tier.KIND for tier in config.listed} for config in (before, after))
    if [*kinds.items()] != [*new_kinds.items()]:
        yield Difference("[[tier]]", _shown_tiers(before.listed), _shown_tiers(after.listed))
    new = {(section, field): value for section, field, value in after.fields()}
    for section, field, old in before.fields():
        key, value = field.removesuffix("_bytes"), new.get((section, field), old)
        is_same_kind = kinds.get(section) == new_kinds.get(section)
        follows = key in _FOLLOW_CAPACITY and _capacity(before, section) != _capacity(after, section)
        if value != old and is_same_kind and not follows:
            show = human_bytes if field.endswith("_bytes") else str
            yield Difference(f"{section}.{key}", show(old), show(value))
    if before.tenant_default != after.tenant_default:
        yield Difference("tenants.default", before.tenant_default, after.tenant_default)
    if before.tenants != after.tenants:
        yield Difference("[[tenant]]", _shown_tenants(before.tenants), _shown_tenants(after.tenants))


def _capacity(config: Config, section: str) -> int:
    tier = config.tier(section)
    return 0 if tier is None else tier.capacity_bytes


def changed_files(before: Mapping[str, Content], after: Mapping[str, Content]) -> Iterator[Difference]:
    """Yield the settings whose path is unchanged but whose file has new content. `before` and `after` are results of
    `contents_of`.
    """
    for name, old in before.items():
        new = after.get(name, old)
        if new.path == old.path and new.digest != old.digest:
            yield Difference(name, old.seen, new.seen)


def _shown_tenants(sections: tuple[TenantSection, ...]) -> str:
    return ", ".join(map(shown_tenant, sections)) or "none"


def _shown_tiers(sections: tuple[TierSection, ...]) -> str:
    return ", ".join(f"{each.name} ({human_bytes(each.capacity_bytes)})" for each in sections)


def shown_tenant(section: TenantSection) -> str:
    """Return a tenant's name and its settings in the file."""
    said = {}
    for tier, share in section.shares:
        said[f"{tier}_max"] = human_bytes(share.max_bytes) if share.max_bytes else ""
        said[f"{tier}_min"] = human_bytes(share.min_bytes) if share.min_bytes else ""
        said[f"{tier}_weight"] = str(share.weight or "")
    said |= {
        "uids": " ".join(map(str, section.uids)),
        "gids": " ".join(map(str, section.gids)),
        "cgroups": " ".join(section.cgroups),
        "socket": "true" if section.socket else "",
        "certificates": " ".join(section.certificates),
        "publisher": section.publisher,
        "readers": " ".join(section.readers),
        "durability": section.durability,
        "ttl_s": str(section.ttl_s or ""),
        "priority": str(section.priority or ""),
        "remote": section.remote,
        "encrypt": "" if section.encrypt is None else str(section.encrypt).lower(),
        "unmapped": "true" if section.unmapped else "",
        "lossy": "true" if section.lossy else "",
        "put_in_place": "" if section.put_in_place is None else str(section.put_in_place).lower(),
    }
    words = ", ".join(f"{key} {value}" for key, value in said.items() if value)
    return f"{section.name} ({words})" if words else section.name


def _merged(old: Config, new: Config, applied: set[str]) -> Config:
    """Return the configuration in force: the new settings that were applied, the old ones elsewhere. So a setting that
    waits for a restart is reported again at the next reload.
    """
    sections = {name: section for name, section in vars(old).items() if is_dataclass(section)}
    return Config(
        **{name: _live(name, section, getattr(new, name), applied) for name, section in sections.items()},
        listed=tuple(_live(each.name, each, new.tier(each.name), applied) for each in old.listed),
        tenants=new.tenants if "[[tenant]]" in applied else old.tenants,
        tenant_default=new.tenant_default if "tenants.default" in applied else old.tenant_default,
        source=new.source,
        written=tuple(_settings_in_force(old.written, new.written, applied)),
    )


def _live(section: str, before: Any, after: Any, applied: set[str]) -> Any:
    """Return a section as it is in force. `after` is None for a tier that is no longer listed."""
    live = {
        field.name: getattr(after, field.name)
        for field in fields(before)
        if f"{section}.{field.name.removesuffix('_bytes')}" in applied
    }
    return replace(before, **live)


def _settings_in_force(
    before: ConfiguredSettings, after: ConfiguredSettings, applied: set[str]
) -> Iterator[ConfiguredSetting]:
    """Yield the settings in force as they were written: a setting that waits for a restart has its old value."""
    latter = {each.name: each for each in after}
    for old in before:
        if not old.tenant:
            new = latter.get(old.name, old)
            yield new if new.name in applied or new.value == old.value else old
    yield from (each for each in (after if "[[tenant]]" in applied else before) if each.tenant)


class Content(NamedTuple):
    """The content of a file that a setting names: `digest` identifies it, and `seen` is a text with the path and time
    of writing.
    """

    path: Path
    digest: bytes
    seen: str


def contents_of(config: Config) -> dict[str, Content]:
    """Return the present content of each file that a setting of `config` names, by the setting's name."""
    named = {f"{section}.{field}": value for section, field, value in config.fields() if isinstance(value, Path)}
    return {name: _content(path) for name, path in named.items() if name not in NEVER_READ and not path.is_dir()}


def _content(path: Path) -> Content:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    except OSError as error:
        return Content(path, b"", f"{path}: {error.strerror}")
    return Content(path, digest, f"{path} of {written}")
