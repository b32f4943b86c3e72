"""Quantises layers with NumPy, to the bit as `csrc/` does it.

Each step has one rounding, in float32: sums go over the tokens in order, each channel alone. All layers are computed at
once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvstore_tiers.codecs.shapes import K, PayloadShape, Tensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
HUGE, TINY, NO_SCALE = np.float32(1e18), np.float32(1e-15), np.float32(1e-30)
_MOST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}


def quantise(
    bits: Sequence[int], shape: PayloadShape, layers: Bytes, coded_bytes: int, room: Bytes, most_lost: float,
    as_they_are: Bytes, sums: npt.NDArray[np.float64],
) -> int:  # fmt: skip
    """Write the coded `layers`, an array [layer, byte], to `room`, `coded_bytes` for each; `bits` is what a number of
    each tensor keeps. A layer that has no form, or loses a larger part of its RMS than `most_lost`, is written as it
    is. Fill `as_they_are` by layer, and `sums`: the squares, the squared errors, and the largest error. Return how many
    layers are as they are, -1 when they do not fit."""
    count = len(layers)
    coded = np.empty((count, coded_bytes), np.uint8)
    amplitude, is_sound = np.zeros(count, np.float32), np.ones(count, bool)
    squares, errors = np.zeros((2, count, sum(each.heads * each.width for each in shape.tensors)), np.float32)
    worst, at, channel = np.zeros(count, np.float32), 0, 0
    with np.errstate(all="ignore"):
        for tensor, kept in zip(shape.tensors, bits, strict=True):
            channels = tensor.heads * tensor.width
            if not kept:
                raw = np.ascontiguousarray(tensor.of(layers)).view(np.uint8)
                coded[:, at : at + tensor.nbytes] = raw.reshape(count, -1)
                at, channel = at + tensor.nbytes, channel + channels
                continue
            numbers = floats_of(tensor, layers).reshape(count, tensor.tokens, channels)
            size = np.abs(numbers)
            is_sound &= np.all(size < HUGE, axis=(1, 2))
            np.maximum(amplitude, np.nan_to_num(size.max(axis=(1, 2))), out=amplitude)
            numbers = np.where(size < HUGE, numbers, np.float32(0))
            parts = _coded(kept, tensor, numbers, squares[:, channel : channel + channels],
                           errors[:, channel : channel + channels], worst)  # fmt: skip
            for part in parts:
                flat = part.reshape(count, -1)
                coded[:, at : at + flat.shape[1]] = flat
                at += flat.shape[1]
            channel += channels
    whole, lost = (np.array([_sum_of(layer) for layer in each]) for each in (squares, errors))
    is_bad = lost > most_lost * most_lost * whole
    as_they_are[:] = ~is_sound | is_bad | ((amplitude > 0) & (amplitude < TINY))
    written = 0
    for number, is_as_it_is in enumerate(as_they_are.tolist()):
        stored = layers[number] if is_as_it_is else coded[number]
        if room.nbytes - written < max(stored.nbytes, coded_bytes):
            return -1
        room[written : written + stored.nbytes] = stored
        written += stored.nbytes
        if not is_as_it_is:
            sums[:] = sums[0] + whole[number], sums[1] + lost[number], max(sums[2], worst[number])
    return int(as_they_are.sum())


def _sum_of(by_channel: Floats) -> float:
    """Return a sum as the compiled code forms it: of sixteen lanes first, in order."""
    lanes = np.zeros(16, np.float32)
    for first in range(0, len(by_channel), 16):
        part = by_channel[first : first + 16]
        lanes[: len(part)] += part
    return float(np.cumsum(lanes, dtype=np.float64)[-1])


def dequantise(bits: Sequence[int], shape: PayloadShape, coded: Bytes, layers: Bytes) -> None:
    """Fill `layers` from `coded`, both arrays [layer, byte]; `bits` is what a number of each tensor has kept."""
    count, at = len(layers), 0
    with np.errstate(all="ignore"):
        for tensor, kept in zip(shape.tensors, bits, strict=True):
            channels = tensor.heads * tensor.width
            target = tensor.of(layers).view(f"<u{tensor.type.nbytes}")
            if not kept:
                raw = np.ascontiguousarray(coded[:, at : at + tensor.nbytes])
                target[:] = raw.view(target.dtype).reshape(target.shape)
                at += tensor.nbytes
                continue
            rows, columns = _scale_size(kept, tensor, channels)
            scale_bytes = rows * columns * tensor.type.nbytes
            found = []
            for _ in range(1 if kept == 8 else 2):
                raw = np.ascontiguousarray(coded[:, at : at + scale_bytes])
                found.append(_spread(kept, tensor, channels, _read(tensor, raw).reshape(count, rows, columns)))
                at += scale_bytes
            row_bytes = channels if kept == 8 else (channels + 1) // 2
            raw = coded[:, at : at + tensor.tokens * row_bytes].reshape(count, tensor.tokens, row_bytes)
            at += tensor.tokens * row_bytes
            if kept == 8:
                numbers = raw.view(np.int8).astype(np.float32) * found[0]
            else:
                small = np.stack((raw & 15, raw >> 4), axis=-1).reshape(count, tensor.tokens, -1)[:, :, :channels]
                numbers = small.astype(np.float32) * found[0] + found[1]
            target[:] = _written(tensor, numbers).reshape(target.shape)


def floats_of(tensor: Tensor, layers: Bytes) -> Floats:
    """Return the numbers of a tensor as float32, [layer, token, head, number]."""
    bits = tensor.of(layers).view(f"<u{tensor.type.nbytes}")
    return _read(tensor, np.ascontiguousarray(bits).view(np.uint8)).reshape(bits.shape)


def _coded(
    bits: int, tensor: Tensor, numbers: Floats, squares: Floats, errors: Floats, worst: Floats
) -> list[npt.NDArray[np.uint8]]:
    """Return scales, smallest numbers and numbers as bytes, and add the error. `numbers` is [layer, token, channel]."""
    channels = numbers.shape[2]
    rows, columns = _scale_size(bits, tensor, channels)
    low, high, top = (_ranges(bits, tensor, numbers, rows, columns, which) for which in ("low", "high", "top"))
    step = top / np.float32(127) if bits == 8 else (high - low) / np.float32(15)
    step = np.where(step < NO_SCALE, np.float32(0), step)
    scale_bits = _not_below(tensor, step)
    scale = _read(tensor, scale_bits)
    inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    spread = [_spread(bits, tensor, channels, each) for each in (scale, inverse)]
    if bits == 8:
        small = np.rint(np.clip(numbers * spread[1], np.float32(-127), np.float32(127)))
        back = small * spread[0]
        written = [scale_bits, small.astype(np.int8).view(np.uint8)]
    else:
        low_bits = _written(tensor, low + np.float32(0))  # no -0
        lows = _spread(bits, tensor, channels, _read(tensor, low_bits))
        small = np.rint(np.clip((numbers - lows) * spread[1], np.float32(0), np.float32(15)))
        back = small * spread[0] + lows
        padded = np.zeros((*small.shape[:2], channels + channels % 2), np.uint8)
        padded[:, :, :channels] = small
        written = [scale_bits, low_bits, padded[:, :, ::2] | padded[:, :, 1::2] << 4]
    lost = numbers - _read(tensor, _written(tensor, back))
    for token in range(tensor.tokens):
        squares += numbers[:, token] * numbers[:, token]
        errors += lost[:, token] * lost[:, token]
    np.maximum(worst, np.abs(lost).max(axis=(1, 2)), out=worst)
    return [np.ascontiguousarray(each).view(np.uint8) for each in written]


def _scale_size(bits: int, tensor: Tensor, channels: int) -> tuple[int, int]:
    """Return how many rows and columns of scales a tensor has."""
    if tensor.kind == K:
        return -(-tensor.tokens // (64 if bits == 8 else 32)), channels
    return tensor.tokens, 1 if bits == 8 else -(-channels // 32)


def _ranges(bits: int, tensor: Tensor, numbers: Floats, rows: int, columns: int, which: str) -> Floats:
    """Return the smallest or largest numbers, or magnitudes, that share a scale, as [layer, row, column]."""
    reduce = np.minimum.reduceat if which == "low" else np.maximum.reduceat
    source = np.abs(numbers) if which == "top" else numbers
    axis, count = (1, rows) if tensor.kind == K else (2, columns)
    step = (64 if bits == 8 else 32) if tensor.kind == K else (numbers.shape[2] if bits == 8 else 32)
    found: Floats = reduce(source, np.arange(count) * step, axis=axis)
    return found


def _spread(bits: int, tensor: Tensor, channels: int, scales: Floats) -> Floats:
    """Return the scale of each number, [layer, token, channel] or smaller where one value serves all."""
    if tensor.kind == K:
        return np.repeat(scales, 64 if bits == 8 else 32, axis=1)[:, : tensor.tokens]
    return scales if bits == 8 else np.repeat(scales, 32, axis=2)[:, :, :channels]


def _read(tensor: Tensor, raw: npt.NDArray[np.generic]) -> Floats:
    """Return numbers of the tensor's type as float32."""
    if tensor.type.name == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(tensor.type.typestr).astype(np.float32)


def _written(tensor: Tensor, numbers: Floats) -> npt.NDArray[np.generic]:
    """Return finite numbers clamped and rounded to the tensor's type, as unsigned integers."""
    most = np.float32(_MOST[tensor.type.name])
    numbers = np.ascontiguousarray(np.clip(numbers, -most, most))
    if tensor.type.name == "bfloat16":
        words = numbers.view(np.uint32)
        return ((words + np.uint32(0x7FFF) + ((words >> 16) & np.uint32(1))) >> 16).astype(np.uint16)
    return numbers.astype(tensor.type.typestr).view(f"<u{tensor.type.nbytes}")


def _not_below(tensor: Tensor, numbers: Floats) -> npt.NDArray[np.generic]:
    """Return the smallest numbers of the tensor's type that are not below `numbers`, as unsigned integers."""
    bits = _written(tensor, numbers)
    return bits if tensor.type.nbytes == 4 else (bits + (_read(tensor, bits) < numbers)).astype(np.uint16)
