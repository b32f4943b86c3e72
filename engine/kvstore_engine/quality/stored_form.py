"""The form in which the store keeps a model's payloads: what a codec gives back of them, and which layers bear it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvstore_engine.errors import UsageError
from kvstore_engine.quality.measure import Bytes, Comparison, Difference, Through, Tokens

if TYPE_CHECKING:
    from kvstore_proto.fingerprint import Fingerprint


@dataclass(frozen=True)
class Part:
    """K ("k") or V ("v") of one layer."""

    layer: int
    name: str


class StoredForm:
    """Payloads of the model `fingerprint` in the codec `name` of the store. Raises UsageError for an unknown codec, and
    for one that lacks a package."""

    def __init__(self, name: str, fingerprint: Fingerprint) -> None:
        # By name: an engine runs without the store's packages, and this measures what they do.
        codecs, native = import_module("kvstore_tiers.codecs"), import_module("kvstore_tiers.codecs.native")
        if name not in codecs.codec_names() or name == codecs.NONE:
            known = ", ".join(each for each in codecs.codec_names() if each != codecs.NONE)
            raise UsageError(f"codec {name!r} is unknown; known: {known}")
        self._codec, self._fingerprint, self._name = codecs.codec_named(name), fingerprint, name
        if lacks := self._codec.lacks():
            raise UsageError(f"codec {name}: {lacks}")
        native.wait_for_library()
        self._shapes: Any = import_module("kvstore_tiers.codecs.shapes")
        self._profiles: Any = import_module("kvstore_tiers.codecs.profiles")
        self._header = import_module("kvstore_proto.arena").BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), 0)

    def grades(self) -> list[str]:
        """Return the codecs that a profile may give to a layer, the smallest first: this one, and finer ones. Raises
        UsageError for a codec that loses nothing."""
        bits: dict[str, int] = self._profiles.BITS
        if self._name not in bits:
            raise UsageError(f"--profile is for {' or '.join(each for each in bits if bits[each])}, not {self._name}")
        return [each for each in bits if bits[each] >= bits[self._name]]

    @property
    def parts(self) -> list[Part]:
        """Return K and V of all layers."""
        return [Part(layer, name) for layer in self._fingerprint.groups[0].layers for name in self._profiles.PARTS]

    def through(self, chosen: dict[Part, str] | None = None) -> Through:
        """Return a function of a payload: what the codec gives back of it, and the bytes that it stores. It changes the
        parts in `chosen`, each with the codec that it has there, and no other; None: all of them."""
        given = None if chosen is None else self._profile(chosen, 0.0)
        group = self._fingerprint.groups[0]

        def changed(payload: Bytes) -> tuple[Bytes, int]:
            shape = self._shapes.payload_shape(self._fingerprint, group.group_id, payload.size)
            if shape is not None and given is not None:
                shape = shape._replace(bears=given.bears(group.layers, shape))
            room, back = np.empty(self._codec.bound(payload.size), np.uint8), payload.copy()
            encoded = self._codec.encode(self._header, shape, payload.data, room.data)
            if encoded.nbytes:
                self._codec.decode(room.data[: encoded.nbytes], back.data)
            elif given is None:
                raise UsageError(f"codec {self._name} has no form for this model's blocks")
            return back, encoded.nbytes or payload.size

        return changed

    def write_profile(self, path: Path, chosen: dict[Part, str], bound: float) -> None:
        """Write which parts bear which codec. Raises UsageError when the file cannot be written."""
        try:
            self._profile(chosen, bound).write(path)
        except OSError as error:
            raise UsageError(f"--profile {path}: {error.strerror}") from None

    def _profile(self, chosen: dict[Part, str], bound: float) -> Any:
        exact = self._profiles.EXACT
        layers = [
            {name: chosen.get(Part(layer, name), exact) for name in self._profiles.PARTS}
            for layer in self._fingerprint.groups[0].layers
        ]
        known = self._fingerprint
        return self._profiles.Profile(known.model_name, known.weights_digest, bound, tuple(layers))


def each_alone(
    comparison: Comparison, windows: Sequence[Tokens], form: StoredForm, changes: Sequence[dict[Part, str]]
) -> list[Difference]:
    """Return the differences over all `windows` that each of `changes` makes alone."""
    found = [Difference() for _ in changes]
    for window in windows:
        for whole, one in zip(found, comparison.window(window, map(form.through, changes)), strict=True):
            whole.join(one)
    return found


def find_profile(
    comparison: Comparison, windows: Sequence[Tokens], form: StoredForm, grades: Sequence[str], bound: float
) -> dict[Part, tuple[str, Difference]]:
    """Return, by part, the first of the codecs `grades` that costs at most `bound` nats a position when no other part
    is changed, and what it costs; the part is not there if none does."""
    found: dict[Part, tuple[str, Difference]] = {}
    for grade in grades:
        rest = [part for part in form.parts if part not in found]
        alone = each_alone(comparison, windows, form, [{part: grade} for part in rest])
        for part, made in zip(rest, alone, strict=True):
            if made.report()["kl"] <= bound:
                found[part] = grade, made
    return found
