"""A connector whose engine is not installed says so in one sentence, with what to install."""

from __future__ import annotations

import importlib
import sys

import pytest


@pytest.mark.parametrize(
    ("hook", "module", "install"),
    [("llama_cpp", "llama_cpp", "pip install llama-cpp-python"), ("sglang", "torch", "pip install sglang")],
)
def test_a_missing_engine_is_named(monkeypatch: pytest.MonkeyPatch, hook: str, module: str, install: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    monkeypatch.delitem(sys.modules, f"kvstore_client.hooks.{hook}", raising=False)
    with pytest.raises(ImportError, match=install) as caught:
        importlib.import_module(f"kvstore_client.hooks.{hook}")
    assert "\n" not in str(caught.value) and caught.value.__suppress_context__
