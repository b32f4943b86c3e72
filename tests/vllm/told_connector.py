"""kvstored's connector in an engine on CPUs, whose loads into the pool can be slowed, held up or broken by layer.

Lies beside `engine_child`, so that engines find it: `kv_connector="ToldConnector"`. KVSTORED_TOLD names a file that is
read at each load; a file that is not there says nothing. It holds a JSON object:

- `layer_s`: seconds that each layer takes on top, in which no processor works.
- `in_turn`: the step begins once all layers are there.
- `gated`: a layer is copied once the engine has begun to compute the one before it.
- `breaks_at`: the layer whose copy fails, after the engine has begun to compute the one before it.

Owns nothing else: what is loaded, and what becomes of a failure, is the connector's own.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvstore_connectors.vllm import tensors
from kvstore_connectors.vllm.connector import KVStoreConnector
from kvstore_connectors.vllm.host_pages import HostLoad, PagedLayers

PATIENCE_S = 60.0


class _Computing:
    """The count of the layers that the engine has begun to compute in this step."""

    def __init__(self) -> None:
        self.layers = 0
        self._changed = threading.Condition()

    def begun(self, layers: int) -> None:
        with self._changed:
            self.layers = layers
            self._changed.notify_all()

    def wait(self, layers: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.layers >= layers, PATIENCE_S):
                raise RuntimeError("the engine waits for layers that it does not need yet")


_computing = _Computing()


class _ToldLayers(PagedLayers):
    """The pool in host memory. `told`: what the file says about the load under way."""

    told: Mapping[str, Any] = MappingProxyType({})

    def load(self, sources: Any, after: Any) -> HostLoad:
        self.told = _told()
        return super().load(sources, after)

    def scatter(self, copies: Any, layers: range) -> None:
        layer = layers.start
        time.sleep(self.told.get("layer_s", 0.0))
        if layer and (self.told.get("gated") or self.told.get("breaks_at") == layer):
            _computing.wait(layer)
        if self.told.get("breaks_at") == layer:
            raise RuntimeError("a layer is broken")
        super().scatter(copies, layers)


class ToldConnector(KVStoreConnector):
    """The connector that is told."""

    def register_kv_caches(self, kv_caches: Any) -> None:
        tensors.PagedLayers = _ToldLayers  # type: ignore[misc]
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        _computing.begun(0)
        super().start_load_kv(forward_context, **kwargs)
        if self._orders().loads and _told().get("in_turn"):
            super().wait_for_layer_load("")  # no layer has this name: the connector waits for all

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        _computing.begun(_computing.layers + 1)


def _told() -> dict[str, Any]:
    place = Path(os.environ.get("KVSTORED_TOLD", ""))
    found: dict[str, Any] = json.loads(place.read_text()) if place.is_file() else {}
    return found
