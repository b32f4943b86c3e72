"""llama.cpp's saved state, taken apart into blocks of tokens and put together again.

A saved state holds the whole sequence layer by layer, so that the states of two turns of one conversation share hardly
a byte range. Cut by tokens instead, a turn's blocks begin with the blocks of the last turn, and are stored once.

The format (`llama_context::state_write_data` and `llama_kv_cache::state_write` of llama.cpp), little-endian:

    u32 length, architecture's name; then one attention cache; or two, of the layers without a window and of the
    windowed ones, whose cells are a ring: in any order, the oldest positions gone
    u32 streams (1), u32 cells, then for each cell: i32 position, u32 sequences (1), i32 sequence (0)
    u32 values are transposed, u32 layers
    for each layer: i32 type of K, u64 bytes of a row, rows in cell order
    for each layer, values not transposed: i32 type of V, u64 bytes of a row, rows in cell order
    for each layer, values transposed: i32 type of V, u32 bytes of an element, u32 elements, for each all cells

Where layers are recurrent, their one cell is behind, or instead of, that cache: u32 cells (1), i32 position of the last
token, u32 sequences (1), i32 sequence (0), and bytes that only llama.cpp reads, equally many in each state.

The module parses and assembles states, and reads the numbers in a plane, for a sketch of the values. A plane of an
unknown ggml type is read as bytes; then a sketch agrees only for equal bytes. Pure: no llama.cpp, no store. Invariant:
a state is understood to its last byte or refused (StateUnsupported), so additions of later versions are never
guessed.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
_CELL = np.dtype([("position", "<i4"), ("sequences", "<u4"), ("sequence", "<i4")])
_MAX_NAME_BYTES = 256
_MAX_LAYERS = 4096
Floats = npt.NDArray[np.float32]

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, BF16 = 0, 1, 2, 3, 6, 7, 8, 20, 30
_BLOCK = 32  # numbers that share a scale
_BLOCK_BYTES = {Q4_0: 18, Q4_1: 20, Q5_0: 22, Q5_1: 24, Q8_0: 34, IQ4_NL: 18}
_IQ4_NL_VALUES = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
)  # fmt: skip


class StateUnsupported(ValueError):
    """The error of a saved state that cannot be cut into blocks, since it is not one plain attention cache of one
    sequence. The message says what it is.
    """


@dataclass(frozen=True, slots=True)
class Plane:
    """The K or the V numbers of one layer in a saved state. `ggml_type` is the ggml number of their type, and
    `token_bytes` the bytes of one token. If the numbers are transposed, `element_bytes` is the size of one number,
    otherwise 0.
    """

    ggml_type: int
    token_bytes: int
    element_bytes: int = 0  # 0: a token's bytes are contiguous

    def of(self, region: Bytes, tokens: int) -> Bytes:
        """Return `region`, the bytes of this plane for `tokens` tokens, as a uint8 view with one row, or if transposed
        with one row for each element of a token.
        """
        if self.element_bytes:
            return region.reshape(self.token_bytes // self.element_bytes, tokens * self.element_bytes)
        return region.reshape(1, tokens * self.token_bytes)

    @property
    def step_bytes(self) -> int:
        """The bytes of one token in one row of the view that `of` returns."""
        return self.element_bytes or self.token_bytes


@dataclass(frozen=True, slots=True)
class StateShape:
    """The description of a model's saved states: everything in one that does not depend on its tokens. `keys` and
    `values` have one plane for each layer. `window` describes the cache of windowed layers, if they have one;
    `recurrent_bytes` is the size of the state that recurrent layers keep.
    """

    architecture: bytes
    is_transposed: bool
    keys: tuple[Plane, ...]
    values: tuple[Plane, ...]  # as many as keys, or none
    window: StateShape | None = None
    recurrent_bytes: int = 0

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of all layers in the order of a block's payload: K and V of the first layer, K and V of the
        second, ...
        """
        if not self.values:
            return self.keys
        return tuple(plane for pair in zip(self.keys, self.values, strict=True) for plane in pair)

    @property
    def layer_bytes(self) -> list[int]:
        """The bytes of one token's K and V, for each layer."""
        values = self.values or (Plane(0, 0),) * len(self.keys)
        return [key.token_bytes + value.token_bytes for key, value in zip(self.keys, values, strict=True)]

    @property
    def token_bytes(self) -> int:
        return sum(self.layer_bytes)

    @property
    def types(self) -> str:
        """The types of K and V as text, by their ggml numbers, such as "1/1"."""
        return "/".join(
            ",".join(str(number) for number in sorted({plane.ggml_type for plane in planes}))
            for planes in (self.keys, self.values)
        )

    @property
    def layout(self) -> str:
        return "llama.cpp/layer-major/k-then-v/" + ("v-transposed" if self.is_transposed else "token-major")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A saved state that was taken apart. `positions` has the position of each cell (a token's place in the cache), and
    `regions` are views of the bytes of each plane, in the order of `StateShape.planes`. `window` has these of windowed
    layers, if they have a cache of their own, and `recurrent` what recurrent layers keep at the end.
    """

    shape: StateShape
    positions: npt.NDArray[np.int32]
    regions: tuple[Bytes, ...]
    window: SavedState | None = None
    recurrent: Bytes | None = None

    def holds(self, tokens: int) -> bool:
        """Return whether the first `tokens` cells (places of the cache) have the positions 0, 1, ..., so that blocks
        can be cut from them.
        """
        return len(self.positions) >= tokens and bool(np.array_equal(self.positions[:tokens], np.arange(tokens)))

    def whole_blocks(self, blocks: int, block_tokens: int) -> list[int]:
        """Return which of the first `blocks` blocks are there with each of their positions, once."""
        inside = self.positions[(self.positions >= 0) & (self.positions < blocks * block_tokens)]
        counts = np.bincount(inside, minlength=blocks * block_tokens).reshape(blocks, block_tokens)
        return [int(block) for block in np.flatnonzero((counts == 1).all(axis=1))]

    def write_block(self, first: int, tokens: int, destination: Bytes) -> None:
        """Write the payload of one block to `destination`: K and V of the `tokens` tokens from position `first` on."""
        cells = np.flatnonzero((self.positions >= first) & (self.positions < first + tokens))
        cells = cells[np.argsort(self.positions[cells])]
        at: slice | npt.NDArray[np.int64] = cells
        if len(cells) == tokens and cells[-1] - cells[0] == tokens - 1 and (np.diff(cells) == 1).all():
            at = slice(int(cells[0]), int(cells[-1]) + 1)
        start = 0
        for plane, region in zip(self.shape.planes, self.regions, strict=True):
            end = start + tokens * plane.token_bytes
            rows = plane.of(region, len(self.positions)).reshape(-1, len(self.positions), plane.step_bytes)
            target = plane.of(destination[start:end], tokens).reshape(-1, tokens, plane.step_bytes)
            np.copyto(target, rows[:, at])
            start = end


def parse_state(
    data: bytes | bytearray | memoryview | Bytes, *, attends: bool = True, recurs: bool = False
) -> SavedState:
    """Take apart the bytes of a saved state, and return its description and views of its parts. `attends`: the model
    has layers with attention; `recurs`: it has recurrent ones. Raises StateUnsupported for a state in another form.
    """
    cursor = _Cursor(np.frombuffer(data, np.uint8))
    name_bytes = cursor.number("<I")
    if name_bytes > _MAX_NAME_BYTES:
        raise StateUnsupported("it does not begin with the name of an architecture")
    architecture = cursor.take(name_bytes).tobytes()
    empty = SavedState(StateShape(architecture, False, (), ()), np.zeros(0, np.int32), ())
    whole = _parse_cache(cursor, architecture) if attends else empty
    if recurs:
        cells, _, sequences, sequence = (cursor.number("<i") for _ in range(4))
        if (cells, sequences, sequence) != (1, 1, 0):
            raise StateUnsupported("its recurrent layers do not keep one state of one sequence")
        rest = cursor.rest()
        return replace(whole, shape=replace(whole.shape, recurrent_bytes=len(rest)), recurrent=rest)
    if cursor.is_at_end:
        return whole
    try:
        window = _parse_cache(cursor, architecture)
    except StateUnsupported:
        window = None
    if window is None or not cursor.is_at_end:
        raise StateUnsupported("it holds more than attention caches")
    return replace(whole, shape=replace(whole.shape, window=window.shape), window=window)


def _parse_cache(cursor: _Cursor, architecture: bytes) -> SavedState:
    streams = cursor.number("<I")
    if streams != 1:
        raise StateUnsupported(f"it has {streams} streams, and one can be stored")
    count = cursor.number("<I")
    if count == 0:
        raise StateUnsupported("it is empty")
    cells = cursor.take(count * _CELL.itemsize).view(_CELL)
    if (cells["sequences"] != 1).any() or cells["sequence"].any():
        raise StateUnsupported("its cells are not those of one sequence")
    transposed, layers = cursor.number("<I"), cursor.number("<I")
    if transposed > 1 or not 1 <= layers <= _MAX_LAYERS:
        raise StateUnsupported("what follows its cells is no attention cache")
    keys = [cursor.plane(count, is_transposed=False) for _ in range(layers)]
    values = [] if cursor.is_at_end else [cursor.plane(count, is_transposed=bool(transposed)) for _ in range(layers)]
    shape = StateShape(
        architecture, bool(transposed), tuple(plane for plane, _ in keys), tuple(plane for plane, _ in values)
    )
    regions = tuple(region for pair in zip(keys, values, strict=True) for _, region in pair) if values else ()
    return SavedState(shape, cells["position"].astype(np.int32), regions or tuple(region for _, region in keys))


def assemble_state(
    shape: StateShape,
    blocks: Sequence[Bytes],
    block_tokens: int,
    window: Sequence[Bytes] = (),
    recurrent: tuple[int, Bytes] | None = None,
) -> Bytes:
    """Return the bytes of the saved state of a sequence. `blocks` are the payloads of its consecutive blocks, of
    `block_tokens` tokens each, and `shape` describes the model's states. `window`: the payloads of the last blocks of
    windowed layers; `recurrent`: the tokens of the sequence, and the state of recurrent layers behind them.
    """
    head = struct.pack("<I", len(shape.architecture)) + shape.architecture
    caches = [(shape, blocks)] if shape.keys else []
    if shape.window is not None:
        caches.append((shape.window, window))
    tail = b"" if recurrent is None else struct.pack("<IiIi", 1, recurrent[0] - 1, 1, 0) + recurrent[1].tobytes()
    sizes = [_cache_bytes(each, len(payloads) * block_tokens) for each, payloads in caches]
    whole = np.empty(len(head) + sum(sizes) + len(tail), np.uint8)
    whole[: len(head)] = np.frombuffer(head, np.uint8)
    position = len(head)
    for (each, payloads), size in zip(caches, sizes, strict=True):
        first = (len(blocks) - len(payloads)) * block_tokens
        _fill_cache(whole[position : position + size], each, payloads, block_tokens, first)
        position += size
    whole[position:] = np.frombuffer(tail, np.uint8)
    return whole


def _heads(shape: StateShape) -> list[bytes]:
    heads = [struct.pack("<iQ", plane.ggml_type, plane.token_bytes) for plane in shape.keys]
    return heads + [_value_head(plane) for plane in shape.values]


def _cache_bytes(shape: StateShape, tokens: int) -> int:
    return 16 + tokens * (_CELL.itemsize + shape.token_bytes) + sum(map(len, _heads(shape)))


def _fill_cache(whole: Bytes, shape: StateShape, blocks: Sequence[Bytes], block_tokens: int, first: int) -> None:
    """Write the cache of consecutive blocks from position `first` on to `whole`, which it fills."""
    tokens = len(blocks) * block_tokens
    cells = np.zeros(tokens, _CELL)
    cells["position"], cells["sequences"] = np.arange(first, first + tokens), 1
    front = struct.pack("<II", 1, tokens) + cells.tobytes() + struct.pack("<II", shape.is_transposed, len(shape.keys))
    whole[: len(front)] = np.frombuffer(front, np.uint8)
    position = len(front)
    for index, plane_head in enumerate(_heads(shape)):
        whole[position : position + len(plane_head)] = np.frombuffer(plane_head, np.uint8)
        position += len(plane_head)
        plane = (*shape.keys, *shape.values)[index]
        rows = plane.of(whole[position : position + tokens * plane.token_bytes], tokens)
        start = _payload_offset(shape, index) * block_tokens
        step = block_tokens * plane.step_bytes
        for number, block in enumerate(blocks):
            source = plane.of(block[start : start + block_tokens * plane.token_bytes], block_tokens)
            np.copyto(rows[:, number * step : (number + 1) * step], source)
        position += tokens * plane.token_bytes


def _payload_offset(shape: StateShape, index: int) -> int:
    """Return the bytes that a token takes in a payload before the plane that is number `index` in the saved state."""
    layers = len(shape.keys)
    layer, is_value = index % layers, index >= layers
    return sum(shape.layer_bytes[:layer]) + (shape.keys[layer].token_bytes if is_value else 0)


def _value_head(plane: Plane) -> bytes:
    if plane.element_bytes:
        return struct.pack("<iII", plane.ggml_type, plane.element_bytes, plane.token_bytes // plane.element_bytes)
    return struct.pack("<iQ", plane.ggml_type, plane.token_bytes)


class _Cursor:
    """A cursor that reads forward through a state; a state that ends too early is unsupported, never an IndexError."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._position = 0

    @property
    def is_at_end(self) -> bool:
        return self._position == len(self._data)

    def take(self, nbytes: int) -> Bytes:
        end = self._position + nbytes
        if end > len(self._data):
            raise StateUnsupported(f"it ends after {len(self._data)} bytes, in the middle of something")
        taken = self._data[self._position : end]
        self._position = end
        return taken

    def rest(self) -> Bytes:
        return self.take(len(self._data) - self._position)

    def number(self, form: str) -> int:
        (value,) = struct.unpack(form, self.take(struct.calcsize(form)).tobytes())
        return int(value)

    def plane(self, tokens: int, *, is_transposed: bool) -> tuple[Plane, Bytes]:
        ggml_type = self.number("<i")
        if is_transposed:
            element_bytes, elements = self.number("<I"), self.number("<I")
            plane = Plane(ggml_type, element_bytes * elements, element_bytes)
        else:
            plane = Plane(ggml_type, self.number("<Q"))
        if not plane.token_bytes:
            raise StateUnsupported("a layer of it has no bytes")
        return plane, self.take(tokens * plane.token_bytes)


def plane_values(plane: Plane, region: Bytes, tokens: int) -> Floats:
    """Return the numbers of K or V of one layer, as float32 [tokens, numbers of a token]. `region` has their bytes for
    `tokens` tokens.
    """
    if plane.element_bytes:
        elements = plane.of(region, tokens).reshape(-1, tokens, plane.element_bytes)
        region = np.ascontiguousarray(elements.transpose(1, 0, 2)).reshape(-1)
    return _values(plane.ggml_type, np.ascontiguousarray(region)).reshape(tokens, -1)


def _values(ggml_type: int, raw: Bytes) -> Floats:
    if ggml_type == F32:
        return raw.view("<f4").astype(np.float32)
    if ggml_type == F16:
        return raw.view("<f2").astype(np.float32)
    if ggml_type == BF16:
        return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    size = _BLOCK_BYTES.get(ggml_type)
    if size is None or len(raw) % size:
        return raw.astype(np.float32) - 127.5
    blocks = raw.reshape(-1, size)
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
    if ggml_type == Q8_0:
        return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)
    at, least = 2, np.zeros((1, 1), np.float32)
    if ggml_type in (Q4_1, Q5_1):
        at, least = 4, blocks[:, 2:4].copy().view("<f2").astype(np.float32)
    high = np.zeros((len(blocks), _BLOCK), np.uint8)
    if ggml_type in (Q5_0, Q5_1):
        high = np.unpackbits(blocks[:, at : at + 4], axis=1, bitorder="little") * np.uint8(16)
        at += 4
    packed = blocks[:, at:]
    codes = np.concatenate([packed & 15, packed >> 4], axis=1) | high
    if ggml_type == IQ4_NL:
        return (scale * _IQ4_NL_VALUES[codes]).reshape(-1)
    middle = {Q4_0: 8.0, Q5_0: 16.0}.get(ggml_type, 0.0)
    return (scale * (codes.astype(np.float32) - np.float32(middle)) + least).reshape(-1)
