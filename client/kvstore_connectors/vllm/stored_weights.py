"""The objects that an engine's weights are loaded from, by `load_format="kvstored"`: their names, and their digest.

The module asks the catalogue, and imports neither vLLM nor torch. Invariant: in a process that has loaded weights, the
digest names the versions that were loaded, whatever was put under their names since. Several workers load one by
one, so their settings must name versions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_client.objects.store import ObjectStore, label, named, open_objects
from kvstore_connectors.vllm.settings import VllmWeightsSettings, parse
from kvstore_proto.errors import KVStoreError
from kvstore_proto.v1 import kvstore_pb2 as wire

FORMAT = "kvstored"
_WHERE = "model_loader_extra_config"
_loaded: dict[VllmWeightsSettings, str] = {}


def parse_weights_settings(given: object, workers: int) -> VllmWeightsSettings:
    """Return the loader's settings in `given`, checked, for an engine of `workers` workers. Raises ValueError with a
    sentence that names the wrong key.
    """
    if not isinstance(given, Mapping) or not given.get("object"):
        raise ValueError(f'{_WHERE}: say which object has the weights: {{"object": "NAME"}}')
    settings = parse(VllmWeightsSettings, given, _WHERE)
    tables = tables_of(settings)
    if workers > 1 and tables:
        raise ValueError(f"{_WHERE}: tables are for one worker, and this engine has {workers}")
    if workers > 1 and not named(settings.object)[1]:
        raise ValueError(f"{_WHERE}: {workers} workers must load one version: name it, as in {settings.object}@1")
    return settings


def tables_of(settings: VllmWeightsSettings) -> dict[str, str]:
    """Return the tables in `settings`: the name of the object, by the name of the parameter. Raises ValueError."""
    pairs = [each.partition("=") for each in settings.tables.split()]
    for parameter, _, table in pairs:
        if not parameter or not table:
            raise ValueError(f"{_WHERE}: tables must be PARAMETER=OBJECT, separated by spaces, got {settings.tables!r}")
    return {parameter: table for parameter, _, table in pairs}


def opened(settings: VllmWeightsSettings) -> ObjectStore:
    """Connect to the daemon of `settings`. Raises KVStoreError."""
    return open_objects(
        settings.socket or None, pool=settings.pool, deadline_s=settings.load_deadline_ms / 1000,
        connect_timeout_s=settings.connect_timeout_ms / 1000,
    )  # fmt: skip


def note_loaded(settings: VllmWeightsSettings, entry: wire.ObjectVersion, tables: Mapping[str, str]) -> None:
    """Remember that this process has the weights of the version `entry`, and tables, whose digests `tables` has."""
    _loaded[settings] = _text(entry, tables)


def objects_digest(load_config: Any, workers: int) -> str:
    """Return a text that names the weights of an engine by the digests in the catalogue. Raises ValueError for wrong
    settings, and for objects that are not listed.
    """
    settings = parse_weights_settings(load_config.model_loader_extra_config, workers)
    if settings in _loaded:
        return _loaded[settings]
    try:
        with opened(settings) as store:
            tables = {name: store.find(table).digest.hex() for name, table in tables_of(settings).items()}
            return _text(store.find(settings.object), tables)
    except KVStoreError as error:
        raise ValueError(f"the weights of {settings.object} cannot be named: {error}") from None


def described(entry: wire.ObjectVersion) -> str:
    """Return the name, version and size of `entry` for a line of a log."""
    return f"{label(entry)}, {entry.nbytes / 1e6:.0f} MB"


def _text(entry: wire.ObjectVersion, tables: Mapping[str, str]) -> str:
    return " ".join(["object", entry.digest.hex(), *(f"{name}={digest}" for name, digest in sorted(tables.items()))])
