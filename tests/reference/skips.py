"""Skip a test that needs what is not installed here, with the name of what is missing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest


def openai_library() -> ModuleType:
    """Return OpenAI's client, whose import takes a second: only a test that calls it pays."""
    found: ModuleType = pytest.importorskip(
        "openai", reason="the client is not installed: pip install openai (extra dev)"
    )
    return found


def openai_client(url: str, key: str, timeout_s: float = 60) -> Any:
    """Return a client of the server at `url`. It verifies no certificates: the server speaks plain HTTP, and to load
    the certificates takes longer than most tests.
    """
    library = openai_library()
    plain = library.DefaultHttpxClient(verify=False)
    return library.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout_s, http_client=plain)


def skip_without_ggml() -> None:
    from kvstore_engine.ggml import GGMLError, load_library

    try:
        load_library()
    except GGMLError as error:
        pytest.skip(f"no ggml: {error}")


def skip_without_model(name: str) -> None:
    """Unless the model of this name, one that `kvengine fetch` knows, is in the cache."""
    from kvstore_engine.models.cache import cache_root
    from kvstore_engine.models.known import KNOWN_MODELS

    if not (cache_root() / "models" / KNOWN_MODELS[name].file_name).exists():
        pytest.skip(f"{name} is not in the model cache (kvengine fetch {name})")


def skip_without_compiler() -> None:
    """Unless the library that records writes can be compiled."""
    from kvstore_tiers.testing.powerloss import CompilerMissing
    from kvstore_tiers.testing.powerloss.record import shim_path

    try:
        shim_path()
    except CompilerMissing as error:
        pytest.skip(str(error))
