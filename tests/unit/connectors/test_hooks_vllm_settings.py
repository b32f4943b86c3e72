"""The settings of vLLM's kv_connector_extra_config, and the import of the package without vLLM."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import asdict, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import kvstore_connectors.vllm as door
from kvstore_connectors.vllm.model import find_weights
from kvstore_connectors.vllm.settings import VllmConnectorSettings, parse_settings
from kvstore_connectors.vllm.stored_weights import parse_weights_settings

ROOT = Path(__file__).parents[3]


def test_nothing_set_gives_the_defaults() -> None:
    assert parse_settings({}) == VllmConnectorSettings()


def test_what_is_set_is_taken() -> None:
    settings = parse_settings({"socket": "/run/x", "read_only": True, "lookup_deadline_ms": 7, "weights_digest": "v2"})
    assert (settings.socket, settings.read_only, settings.lookup_deadline_ms, settings.weights_digest) == (
        "/run/x", True, 7, "v2",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"sockets": "/run/x"}, "unknown key 'sockets'; did you mean 'socket'"),
        ({"zzz": 1}, "unknown key 'zzz'; known: accepts_lossy, always_load, "),
        ({"read_only": "yes"}, "read_only must be bool, got 'yes'"),
        ({"lookup_deadline_ms": True}, "lookup_deadline_ms must be int, got True"),
        ({"staging_mib": 0}, "staging_mib must be positive, got 0"),
        ({"socket": None}, "socket must be str, got None"),
        ({"store_rate": "fast"}, "store_rate: a rate is auto, off or bytes a second such as 2GiB, got 'fast'"),
        ({"load_rate": "0"}, "load_rate: a rate is auto, off or bytes a second such as 2GiB, got '0'"),
        ({"store_rate": 5}, "store_rate must be str, got 5"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(extra: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refused:
        parse_settings(extra)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("given", "workers", "words"),
    [
        ({}, 1, 'say which object has the weights: {"object": "NAME"}'),
        ({"object": "llama", "table": "x"}, 1, "unknown key 'table'; did you mean 'tables'"),
        ({"object": "llama"}, 2, "2 workers must load one version: name it, as in llama@1"),
        ({"object": "llama@1", "tables": "model.embed_tokens.weight=rows"}, 2, "tables are for one worker"),
        ({"object": "llama", "tables": "model.embed_tokens.weight rows"}, 1, "tables must be PARAMETER=OBJECT"),
    ],
)
def test_settings_of_the_loader_that_make_no_sense_are_refused(given: Any, workers: int, words: str) -> None:
    with pytest.raises(ValueError, match="model_loader_extra_config") as refused:
        parse_weights_settings(given, workers)
    assert words in str(refused.value)


def test_weights_of_an_object_that_nobody_can_name_are_an_error(tmp_path: Path) -> None:
    given = {"object": "llama@2", "socket": str(tmp_path), "connect_timeout_ms": 100}
    load = SimpleNamespace(load_format="kvstored", model_loader_extra_config=given)
    config = SimpleNamespace(
        model_config=None, load_config=load, parallel_config=SimpleNamespace(world_size=2),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"the weights of llama@2 cannot be named"):
        find_weights(config, "")
    assert find_weights(config, "mine") == "stated mine"


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vllm is installed here")
def test_without_vllm_the_class_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"install vllm 0\.32 or later"):
        _ = door.KVStoreConnector


def test_the_door_has_one_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Connector'"):
        _ = door.Connector


def test_every_setting_is_documented_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|", (ROOT / "docs" / "vllm.md").read_text(), re.MULTILINE))
    assert set(rows) == {item.name for item in fields(VllmConnectorSettings)}
    numbers = {name: value for name, value in asdict(VllmConnectorSettings()).items() if type(value) is int}
    assert {name: int(rows[name]) for name in numbers} == numbers
    assert (rows["store_rate"], rows["load_rate"]) == ("`auto`", "`off`")
    assert (VllmConnectorSettings().store_rate, VllmConnectorSettings().load_rate) == ("auto", "off")
    assert rows["read_only"] == "`false`" and VllmConnectorSettings().read_only is False
