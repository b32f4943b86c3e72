"""The settings in `kv_connector_extra_config`, and the tier's settings in its entry of `secondary_tiers`.

The module owns names, defaults and limits. Invariant: an unknown or senseless value is refused with one sentence when
the engine starts, and never ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore_client.link_rate import parse_rate

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_WHERE = "kv_connector_extra_config"
Record = TypeVar("Record", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class VllmConnectorSettings:
    """The settings of the vLLM connector. `socket`: the daemon's socket directory (default: $KVSTORED_SOCKET_DIR, else
    /run/kvstored). `read_only`: restore, never store. `lookup_deadline_ms` and `load_deadline_ms` are the most
    milliseconds that a lookup and a restore may add to a step. A restore that is expected to wait for slower tiers
    longer than `beside_ms` goes on beside the steps, for at most `beside_deadline_ms`. A put takes at most
    `save_deadline_ms`, and delays a step by at most `reuse_wait_ms`. `always_load`: load even if computing is
    expected to be faster. While a GPU decodes, storing keeps to `store_rate`, and a restore beside the steps to
    `load_rate`: `auto`, `off` or bytes a second such as `2GiB`. `weights_digest` names the weights if they cannot be
    read as files. `accepts_lossy`: see `kvstore_client.connect(exact=False)`. `pool`: a shared pool whose blocks are
    meant instead of the tenant's own; who only reads it sets `read_only` too.
    """

    socket: str = ""
    read_only: bool = False
    lookup_deadline_ms: int = 50
    load_deadline_ms: int = 500
    beside_ms: int = 20
    beside_deadline_ms: int = 10_000
    always_load: bool = False
    save_deadline_ms: int = 5000
    reuse_wait_ms: int = 50
    connect_timeout_ms: int = 500
    staging_mib: int = 64
    accepts_lossy: bool = False
    store_rate: str = "auto"
    load_rate: str = "off"
    weights_digest: str = ""
    pool: str = ""


def parse_settings(extra_config: Mapping[str, Any]) -> VllmConnectorSettings:
    """Return the connector's settings in `extra_config`, checked, with defaults for missing keys. Raises ValueError
    with a sentence that names the wrong key.
    """
    settings = parse(VllmConnectorSettings, extra_config, _WHERE)
    for name in ("store_rate", "load_rate"):
        try:
            parse_rate(getattr(settings, name))
        except ValueError as error:
            raise ValueError(f"{_WHERE}: {name}: {error}") from None
    return settings


def parse(record: type[Record], given: Mapping[str, Any], where: str) -> Record:
    """Return an object of the dataclass `record`, made from the settings `given`, whose values are strings, flags and
    positive numbers. `where` says in messages where the settings are written. Raises ValueError with a sentence that
    names the wrong key.
    """
    known = {item.name: str(item.type) for item in fields(record)}
    for name, value in given.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"
            raise ValueError(f"{where}: unknown key {name!r}{hint}")
        wanted: type = {"str": str, "bool": bool, "int": int}[known[name]]
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise ValueError(f"{where}: {name} must be {wanted.__name__}, got {value!r}")
        if isinstance(value, int) and wanted is int and value <= 0:
            raise ValueError(f"{where}: {name} must be positive, got {value}")
    return record(**given)


@dataclass(frozen=True, slots=True)
class VllmTierSettings:
    """The settings of vLLM's secondary tier on kvstored. `socket`: the daemon's socket directory (default:
    $KVSTORED_SOCKET_DIR, else /run/kvstored). `read_only`: load, never store. The deadlines bound one lookup, one load
    and one store of a part of a job. Waiting stores may hold `store_queue_mib` of vLLM's CPU tier; further ones are
    dropped. `keep_after_reset`: go on using stored blocks after vLLM's caches were reset, which is right only if
    weights are never changed in place. `weights_digest` names model and weights for vLLM's plain OffloadingConnector,
    which says neither. `accepts_lossy`: see `kvstore_client.connect(exact=False)`. `pool`: as for the connector.
    """

    socket: str = ""
    read_only: bool = False
    lookup_deadline_ms: int = 100
    load_deadline_ms: int = 2000
    store_deadline_ms: int = 5000
    connect_timeout_ms: int = 500
    load_threads: int = 4
    store_queue_mib: int = 256
    staging_mib: int = 64
    accepts_lossy: bool = False
    enable_kv_events: bool = False
    keep_after_reset: bool = False
    weights_digest: str = ""
    pool: str = ""


@dataclass(frozen=True, slots=True)
class VllmEncoderSettings:
    """The settings of vLLM's connector for encoder outputs. `socket`: the daemon's socket directory (default:
    $KVSTORED_SOCKET_DIR, else /run/kvstored). A lookup with its copy takes at most `lookup_deadline_ms`, and storing an
    output at most `save_deadline_ms`. Outputs expire after `ttl_s` seconds, by default after the tenant's time.
    `weights_digest` names the weights if they cannot be read as files.
    """

    socket: str = ""
    lookup_deadline_ms: int = 200
    save_deadline_ms: int = 1000
    connect_timeout_ms: int = 500
    ttl_s: int = 0
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class VllmWeightsSettings:
    """The settings of the loader `kvstored`. `object`: the name of the weights, as in `llama` or `llama@2`. `tables`
    puts tables in the place of parameters: "PARAMETER=OBJECT", separated by spaces. `socket`: the daemon's socket
    directory (default: $KVSTORED_SOCKET_DIR, else /run/kvstored). Bringing the weights to DRAM takes at most
    `load_deadline_ms`. `pool`: as for the connector.
    """

    object: str = ""
    tables: str = ""
    socket: str = ""
    load_deadline_ms: int = 600_000
    connect_timeout_ms: int = 5000
    pool: str = ""


def parse_tier_settings(given: Mapping[str, Any]) -> VllmTierSettings:
    """Return the tier's settings in `given`, checked, with defaults for missing keys. Raises ValueError with a sentence
    that names the wrong key.
    """
    return parse(VllmTierSettings, given, "secondary_tiers")
