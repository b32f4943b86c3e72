"""The layout of K and V: the module finds K and V of each layer in the payload of a block, as its fingerprint describes
it.

The module owns the words of `Fingerprint.layout` that name an order of bytes: the axes from the outermost to the
innermost, joined by "/". The numbers of a head are always innermost; an order without heads keeps the numbers of a
token together. A layout in other words is opaque: K and V cannot be found in its bytes. An engine with more to say
writes JSON with the order under "order". The module is pure: it uses no memory and no array library.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

from kvstore_proto.errors import InvalidValue
from kvstore_proto.fingerprint import Fingerprint, LayerGroup
from kvstore_proto.number_types import BYTE, NUMBER_TYPES, NumberType, number_type

KINDS: Final = ("k", "v", "bytes")
ENGINE_ORDER: Final = "layer-major/k-then-v/token-major"
HEADS_ORDER: Final = "layer-major/k-then-v/head-major/token"
TOKENS_ORDER: Final = "layer-major/token/k-then-v/head"
PAIRS_ORDER: Final = "layer-major/token/head/k-then-v"
HEAD_PAIRS_ORDER: Final = "layer-major/head/token/k-then-v"
_AXES: Final = {  # T: token, H: head, P: the pair of K and V
    ENGINE_ORDER: "PTH",
    HEADS_ORDER: "PHT",
    TOKENS_ORDER: "TPH",
    PAIRS_ORDER: "THP",
    HEAD_PAIRS_ORDER: "HTP",
}


class Numbers(NamedTuple):
    """The place of an array of numbers in a block's payload. `offset` is the position of its first number in bytes.
    `strides` has for each axis of `shape` the distance in bytes between neighbours.
    """

    type: NumberType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The order in which K and V are stored in the payloads of one layer group, as the fingerprint describes it."""

    fingerprint: Fingerprint
    group: LayerGroup
    _known: dict[tuple[int, int | None, str], Numbers] = field(default_factory=dict, repr=False, compare=False)

    def numbers(self, payload_bytes: int, layer: int | None, kind: str) -> Numbers:
        """Return the offset, shape and strides of K (`kind` "k") or V ("v") of one layer in a payload of
        `payload_bytes` bytes. `layer` counts the layers of the group from 0; None means all layers, as the first axis.
        The shape of one layer is [token, head, number], where the last axis counts the numbers within a head, or
        [token, number] when the group does not say its heads.

        In a group that lists its parts, `kind` is the name of a part, and the shape is [token, *shape of the part]; in
        a recurrent group it is the part's shape. The `kind` "bytes" describes the stored bytes, for any layout. Raises
        InvalidValue, with the reason in one line, when there is no such array.
        """
        asked = payload_bytes, layer, kind
        found = self._known.get(asked)
        if found is None:
            found = self._known[asked] = self._numbers(payload_bytes, layer, kind)
        return found

    def _numbers(self, payload_bytes: int, layer: int | None, kind: str) -> Numbers:
        kinds = (*(part.name for part in self.group.parts), "bytes") if self.group.parts else KINDS
        if kind not in kinds:
            raise InvalidValue(f"kind {kind!r} is unknown; known: {', '.join(kinds)}")
        if layer is None and kind == "bytes":
            return Numbers(BYTE, 0, (payload_bytes,), (1,))
        layers = len(self.group.layers)
        if not layers:
            raise self._opaque("its fingerprint lists no layers")
        if (layer is not None and not 0 <= layer < layers) or payload_bytes % layers:
            raise InvalidValue(f"layer {layer} of {layers} cannot be cut from {payload_bytes} bytes")
        layer_bytes = payload_bytes // layers
        if kind == "bytes":
            return Numbers(BYTE, (layer or 0) * layer_bytes, (layer_bytes,), (1,))
        one = self._of_part(layer_bytes, kind) if self.group.parts else self._of_layer(layer_bytes, kind == "v")
        if layer is None:
            return Numbers(one.type, one.offset, (layers, *one.shape), (layer_bytes, *one.strides))
        return Numbers(one.type, one.offset + layer * layer_bytes, one.shape, one.strides)

    def _of_part(self, layer_bytes: int, name: str) -> Numbers:
        """Return the place of a part of a layer's state: the parts come one after the other, each token by token."""
        if self._order() != ENGINE_ORDER:
            raise self._opaque(f"parts are found in the layout {ENGINE_ORDER!r} alone")
        tokens = self.fingerprint.block_tokens
        if layer_bytes != self.group.layer_bytes(tokens):
            raise self._opaque(f"{layer_bytes} bytes a layer are not its parts'")
        offset = 0
        for part in self.group.parts:
            shape = part.shape if self.group.kind == "recurrent" else (tokens, *part.shape)
            number = NUMBER_TYPES[part.dtype.removeprefix("torch.")]
            if part.name == name:
                break
            offset += prod(shape) * number.nbytes
        strides = tuple(prod(shape[axis + 1 :]) * number.nbytes for axis in range(len(shape)))
        return Numbers(number, offset, shape, strides)

    def _of_layer(self, layer_bytes: int, is_v: bool) -> Numbers:
        axes, number = self._axes(), number_type(self.fingerprint.kv_dtype)
        if number is None:
            known = ", ".join(NUMBER_TYPES)
            raise self._opaque(f"its type {self.fingerprint.kv_dtype!r} is not one of plain numbers ({known})")
        tokens, heads = self.fingerprint.block_tokens, self.group.heads
        row, rest = divmod(layer_bytes, 2 * tokens * number.nbytes)
        if rest or row % (heads or 1) or not row:
            raise self._opaque(f"{layer_bytes} bytes a layer are no K and V of {tokens} tokens, {number.name}")
        if not heads and axes.index("H") < 2:
            raise self._opaque("its fingerprint does not say how many heads there are (LayerGroup.heads)")
        sizes = {"T": tokens, "H": heads or 1, "P": 2}
        inner = row // (heads or 1)
        strides = {
            axis: prod(sizes[later] for later in axes[place + 1 :]) * inner * number.nbytes
            for place, axis in enumerate(axes)
        }
        shape, steps = (tokens, heads, inner), (strides["T"], strides["H"], number.nbytes)
        if not heads:
            shape, steps = (tokens, inner), (strides["T"], number.nbytes)  # type: ignore[assignment]
        return Numbers(number, strides["P"] * is_v, shape, steps)

    def _axes(self) -> str:
        """Return the order of the axes token (T), head (H) and pair of K and V (P) in a layer."""
        if self.group.kind in ("latent", "recurrent"):
            raise self._opaque(f"a group of kind {self.group.kind} has no K and V")
        order = self._order()
        axes = _AXES.get(order)
        if axes is None:
            raise self._opaque(f"its layout {order!r} is none of {', '.join(_AXES)}")
        return axes

    def _order(self) -> str:
        order = self.fingerprint.layout
        if order.startswith("{"):
            try:
                order = str(json.loads(order)["order"])
            except (ValueError, KeyError):
                raise self._opaque("its layout names no order of bytes") from None
        return order

    def _opaque(self, why: str) -> InvalidValue:
        return InvalidValue(f"layer group {self.group.group_id} has no K and V to show: {why}; kind='bytes' does")
