"""Kind "remote": blocks as sealed values in a store on another machine: Mooncake, Redis or Valkey, an object store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from kvstore_proto.version import pip_install
from kvstored.config.mistakes import ConfigError, need, need_within, one_of
from kvstored.config.private_input import read_private_lines
from kvstored.config.section_fields import Table, section_of, size
from kvstored.config.tiers.base import MachineSizes, Start, TierSection
from kvstored.policy_names import ADMISSIONS, SHARES

if TYPE_CHECKING:
    from kvstore_tiers.keyed import KeyedTier

ENCRYPTED, PLAIN, OFF = "encrypted", "plain", "off"
MODES = (ENCRYPTED, PLAIN, OFF)  # of a tenant; "" stands for what the tier says
MIN_EXCHANGE_BYTES = 4 << 20
MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 10, 60_000
_SECRET = re.compile(r"secret|password|token|key|sas|credential", re.IGNORECASE)
_LINE = re.compile(r"([a-z_]+)\s*=\s*(\S.*?)\s*\Z")


@dataclass(frozen=True, kw_only=True)
class RemoteSection(TierSection):
    """The settings of a tier on a remote store. `capacity_bytes` bounds the blocks in the store that this node keeps in
    its block index.

    `share`, `admission` and `rate_bytes` say which blocks are written there, and how fast (bytes a second; 0 is no
    limit). `exchange_bytes` is the size of the memory shared with the worker process that talks to the store."""

    KIND: ClassVar[str] = "remote"
    MOST: ClassVar[int] = 2
    DEFAULTS: ClassVar[Mapping[str, Any]] = {
        "kind": "remote", "enabled": True, "url": "", "capacity": "64GiB", "encrypt": True, "credentials_file": "",
        "timeout_ms": 1000, "exchange": "64MiB", "share": "reused", "admission": "always", "rate": "0",
        "policy": "lfu-ttl", "ttl_s": 0,
    }  # fmt: skip

    url: str
    encrypt: bool
    credentials_file: Path | None
    timeout_ms: int
    exchange_bytes: int
    share: str
    admission: str
    rate_bytes: int

    @classmethod
    def read(cls, name: str, table: Table, machine: MachineSizes) -> Self:
        capacity_bytes = size(name, table, "capacity")
        return section_of(cls, name, table, {"name": name, "capacity_bytes": capacity_bytes})

    def check(self, machine: MachineSizes) -> None:
        name = self.name
        schemes = ", ".join(f"{scheme}://" for scheme in _schemes())
        need(bool(self.url), f'{name}.url is missing: write where the store is, for instance url = "redis://host:6379"')
        need(
            self.url.partition("://")[0] in _schemes() and "://" in self.url,
            f"{name}.url {_without_password(self.url)!r}: begin it with one of {schemes}",
        )
        secret = next((option for option, _ in parse_qsl(urlsplit(self.url).query) if _SECRET.search(option)), "")
        need(not secret, f"{name}.url has {secret}, which others would see: write it into {name}.credentials_file")
        need(self.capacity_bytes > 0, f"{name}.capacity must be more than 0")
        need_within(f"{name}.timeout_ms", self.timeout_ms, MIN_TIMEOUT_MS, MAX_TIMEOUT_MS)
        need(
            MIN_EXCHANGE_BYTES <= self.exchange_bytes <= machine.memory_bytes // 4,
            f"{name}.exchange must be at least 4MiB, and at most a quarter of this machine's memory",
        )
        one_of(f"{name}.share", self.share, SHARES)
        one_of(f"{name}.admission", self.admission, ADMISSIONS)
        super().check(machine)
        if self.enabled:
            need(
                find_spec("cryptography") is not None,
                f"{name}: a tier of kind remote needs more packages: {pip_install('remote')}",
            )
            mistake = self._wrong_option()
            need(not mistake, f"{name}.url: {mistake}")

    def _wrong_option(self) -> str:
        """Return the option in the URL that the library of an object store does not understand; "" if there is none.
        The other drivers have few options, and a worker that refuses them says so in the log.
        """
        from kvstore_tiers.remote.check import mistake_in
        from kvstore_tiers.remote.drivers import DRIVERS

        parts = urlsplit(self.url)
        is_asked = parts.scheme != "file" and DRIVERS[parts.scheme] == "object_store"  # to open a directory makes it
        return mistake_in(self.url) if parts.query and is_asked else ""

    def open(self, start: Start) -> KeyedTier:
        """Open the tier and start its worker process; the store need not be reachable. Raises ConfigError for a
        credentials file that cannot be used.
        """
        from kvstore_tiers.keyed import KeyedTier
        from kvstore_tiers.remote.store import RemoteStore

        if start.cluster is None:
            raise RuntimeError(f"tier {self.name} needs the node's secret")
        mode_of = start.cluster.mode_of

        def is_plain(digest: bytes) -> bool:
            return (mode_of(digest) or (ENCRYPTED if self.encrypt else PLAIN)) == PLAIN

        credentials = read_credentials(f"{self.name}.credentials_file", self.credentials_file)
        store = RemoteStore(
            self.name, self.url, secret=start.cluster.secret, is_plain=is_plain, timeout_s=self.timeout_ms / 1000,
            exchange_bytes=self.exchange_bytes, credentials=credentials,
        )  # fmt: skip
        return KeyedTier(store, self.capacity_bytes, refuses=lambda digest: mode_of(digest) == OFF)

    @property
    def place(self) -> str:
        return _without_password(self.url)


def read_credentials(setting: str, path: Path | None) -> dict[str, str]:
    """Return the credentials in the file `path`, which has lines `name = value`; none without a file. Raises
    ConfigError, which names `setting`.
    """
    if path is None:
        return {}
    found: dict[str, str] = {}
    for number, line in enumerate(read_private_lines(setting, path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line.strip())
        if match is None:
            raise ConfigError(f"{setting}: {path} line {number}: write name = value, for instance password = …")
        found[match[1]] = match[2]
    return found


def _schemes() -> tuple[str, ...]:
    from kvstore_tiers.remote.drivers import DRIVERS

    return tuple(DRIVERS)


def _without_password(url: str) -> str:
    return re.sub(r"(://[^/@:]*):[^/@]*@", r"\1:***@", url)
