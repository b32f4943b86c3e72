"""Every setting of reference.toml is explained, changes the configuration, and is read by the daemon."""

from __future__ import annotations

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from kvstore_simulator.policies import POLICIES as STUDIED
from kvstore_tiers.codecs import TESTING_ENVIRONMENT
from kvstored.config import ConfigError, load_config, reference_text
from kvstored.config.schema import Config
from kvstored.config.tiers import KINDS
from kvstored.policy_names import FOR_STUDIES
from kvstored.store.policies import ADMISSIONS, BEST, POLICIES, resolve
from tests.tidy.tree import PACKAGES, ROOT, modules

_REFERENCE = tomllib.loads(reference_text())
_TIERS = {tier.pop("name"): tier for tier in _REFERENCE.pop("tier")}
_SETTINGS = [
    (section, key, value)
    for section, table in (_REFERENCE | _TIERS).items()
    for key, value in table.items()
    if key != "kind"
]
_COMPANY = {  # what a setting does not go without
    "prefetch.model": ("prefetch.predictor=learned",),
    "encryption.former_key_file": ("encryption.key_file=/tmp/elsewhere",),
    "encryption.default": ("encryption.key_file=/tmp/elsewhere",),
    "events.replay": ("events.listen=ipc:///tmp/events",),
    "unary.listen": ("unary.tokens_file=/tmp/elsewhere",),
    "unary.tls_cert": ("unary.listen=localhost:1", "unary.tokens_file=/tmp/elsewhere", "unary.tls_key=/tmp/key"),
    "unary.tls_client_ca": ("unary.listen=localhost:1", "unary.tls_cert=/tmp/cert", "unary.tls_key=/tmp/key"),
    "unary.tls_key": ("unary.listen=localhost:1", "unary.tokens_file=/tmp/elsewhere", "unary.tls_cert=/tmp/cert"),
}
_OTHER_VALUES = (
    "lru",
    "lfu-ttl",
    "second-touch",
    "none",
    "first",
    "holder",
    "refuse",
    "debug",
    "/tmp/elsewhere",
    "localhost:7443",
    "http://localhost:4318",
    "ipc:///tmp/elsewhere",
    "{tenant}",
    "array",
    "made-up",
    "48MiB",
    "96MiB",
    "3GiB",
)


@pytest.mark.parametrize(("section", "key", "value"), _SETTINGS, ids=lambda item: str(item)[:24])
def test_a_setting_is_explained(section: str, key: str, value: Any) -> None:
    text = re.sub(r'^\[\[tier\]\]\nname = "(\w+)"', r"[\1]", reference_text(), flags=re.MULTILINE)
    line = re.search(rf"^{key} = .*$", text.partition(f"[{section}]\n")[2], re.MULTILINE)
    assert line is not None
    assert re.search(r"#.*\w{3}", line[0]), f"{section}.{key} has no comment in reference.toml"


@pytest.mark.parametrize(("section", "key", "value"), _SETTINGS, ids=lambda item: str(item)[:24])
def test_a_setting_changes_the_configuration(
    section: str, key: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TESTING_ENVIRONMENT, "1")  # else "none" is the only codec
    company = _COMPANY.get(f"{section}.{key}", ())
    if isinstance(value, bool):
        others: list[object] = [str(not value).lower()]
    elif isinstance(value, (int, float)):
        others = [value + 1, value / 2, value * 2]
    else:
        others = [other for other in _OTHER_VALUES if other != value]
    tried = [f"{section}.{key}={other}" for other in (json.dumps(value), *others)]
    usable = (config for override in tried if (config := _load(override, *company)) is not None)
    first = next(usable)
    assert any(config != first for config in usable), f"no other value of {section}.{key} makes another configuration"


def test_every_field_of_the_schema_is_read_by_the_daemon() -> None:
    """A field that only the configuration itself touches, other than to open a tier, does nothing."""
    kinds = [*get_type_hints(Config).values(), *KINDS.values()]
    sections = [kind for kind in kinds if hasattr(kind, "__dataclass_fields__")]
    declared = {field.name for kind in (Config, *sections) for field in fields(kind)}
    read = {
        node.attr
        for path in modules("kvstored")
        for part in _using(path)
        for node in ast.walk(part)
        if isinstance(node, ast.Attribute)
    }
    assert len(declared) > 30
    assert declared - read == set()


def test_every_policy_and_admission_is_documented() -> None:
    reference, page = reference_text(), (ROOT / "docs/policies.md").read_text()
    assert reference.count(f"# {' | '.join(POLICIES)}\n") == 2, "of both tiers"
    assert f"# {' | '.join(ADMISSIONS)}: " in reference
    assert [name for name in (*STUDIED, *ADMISSIONS) if f"| `{name}`" not in page] == []
    assert resolve(BEST) == load_config(None).host.policy
    assert {*POLICIES, *FOR_STUDIES} == set(STUDIED)


def _using(path: Path) -> Iterator[ast.AST]:
    """Return what of a file uses settings: all of it, or what opens a tier."""
    tree = ast.parse(path.read_text())
    if PACKAGES["kvstored"] / "config" not in path.parents:
        yield tree
    else:
        yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "open")


def _load(*overrides: str) -> Config | None:
    try:
        return load_config(None, overrides)
    except ConfigError:
        return None
