"""Blocks on their way into the planes: before a step reads a layer, its stream waits until that layer has come.

Owns the list of loads under way. It never waits itself for a copy. For the engine's thread alone.
"""

from __future__ import annotations

from typing import Protocol


class LayerWaits(Protocol):
    """A load that a stream can wait for."""

    def wait(self, layer: int) -> None:
        """Let what this thread queues from now on run after the layer has come. Never raises."""
        ...


class Arrivals:
    """Into one pool of `layers` layers."""

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._loads: list[LayerWaits] = []

    def add(self, load: LayerWaits) -> None:
        self._loads.append(load)

    def remove(self, load: LayerWaits) -> None:
        """It has come, or failed. Unknown ones are ignored."""
        self._loads = [each for each in self._loads if each is not load]

    def wait(self, layer: int) -> None:
        """Before a step reads K and V of `layer`."""
        for load in self._loads:
            load.wait(layer)

    def wait_all(self) -> None:
        """Before a step that was recorded, or is about to be: what it reads when it is replayed waits for nothing."""
        loads, self._loads = self._loads, []
        for load in loads:
            for layer in range(self._layers):
                load.wait(layer)
