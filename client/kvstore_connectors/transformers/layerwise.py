"""Copies leased blocks into a stack layer by layer, beside the model, which may read a layer as soon as it is there.

Owns the thread and the lease. Whether the lease outlived the copy is known only at the end: what the model computed
meanwhile counts if `finish` says so. Nothing here raises at the model.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import Protocol

from kvstore_connectors.layer_progress import LayerProgress


class Source(Protocol):
    """The copy of one layer."""

    def __call__(self, layer: int) -> None: ...


class Validity(Protocol):
    @property
    def valid(self) -> bool: ...


class LayerCopy:
    """`copy` writes one layer; `held` has the lease, and is closed at the end."""

    def __init__(self, layers: int, copy: Source, lease: Validity, held: ExitStack) -> None:
        self._copy, self._lease, self._held = copy, lease, held
        self._layers = layers
        self._progress = LayerProgress()
        self._is_whole = False
        self._is_valid: bool | None = None
        self._thread = threading.Thread(target=self._run, name="kvstore-hook-layers", daemon=True)

    def start(self) -> LayerCopy:
        self._thread.start()
        return self

    def wait(self, layer: int) -> None:
        """Until a layer may be read, or nothing more will come."""
        if not self._progress.is_over(layer):
            self._progress.wait(lambda: self._progress.is_over(layer))

    def finish(self) -> bool:
        """Wait for all layers and release the lease: whether all that was copied are the leased bytes."""
        if self._is_valid is None:
            self._thread.join()
            self._is_valid = self._is_whole and self._lease.valid
            self._held.close()
        return self._is_valid

    def _run(self) -> None:
        try:
            for layer in range(self._layers):
                self._copy(layer)
                self._progress.advance()
            self._is_whole = True
        except Exception:  # a lease whose memory is gone, or a bug here: the model computes all again
            self._is_whole = False
        self._progress.end()
