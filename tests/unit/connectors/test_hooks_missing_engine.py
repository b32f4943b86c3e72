"""A connector whose engine is not installed says so in one sentence, with what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("hook", "name", "module", "install"),
    [
        ("llama_cpp", "KVStoreLlamaCache", "llama_cpp", "pip install llama-cpp-python"),
        ("sglang", "KVStoreHiCache", "torch", "pip install sglang"),
        ("sglang", "KVStoreLinker", "torch", "pip install sglang"),
    ],
)
def test_a_missing_engine_is_named(
    monkeypatch: pytest.MonkeyPatch, hook: str, name: str, module: str, install: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    for loaded in [each for each in sys.modules if f"{each}.".startswith(f"kvstore_connectors.{hook}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=install) as caught:
        getattr(importlib.import_module(f"kvstore_connectors.{hook}"), name)
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__
