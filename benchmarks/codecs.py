"""Measures the codecs on real K and V: how much smaller they make a block, and how fast, on one core.

The engine computed the payloads from texts of this repository for SmolLM2-135M and Gemma 3 270M
(`support/kv_payloads.py`). A ratio is the bytes of all payloads divided by the bytes that a codec stored for them, with
the frames' heads and tables; the figure is for the model that gains less. Speeds are for whole blocks, encoded and
decoded in turns with one thread's memcpy of 256 MB, the baseline. They are by processor time, of this process and the
one in which a codec works, so other work on the machine changes them little. Each figure is the best turn's, as is the
memcpy's beside it, for the slower of both models. The rows `lossless_library` are of OpenZL alone: its calls for the
tensors of a layer, without the hand-over to its process. The rows of `codec_links.py`, `codec_hits.py` and `kvflow.py`
follow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import codec_hits
import codec_links
import kvflow
import numpy as np
from support.kv_payloads import MODELS, Bytes, Payloads, as_bfloat16, computed
from support.report import AT_LEAST, Row, main, progress

from kvstore_tiers.codecs import Codec, codec_named
from kvstore_tiers.codecs.library_worker import OpenZL
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.testing.kv_blocks import kv_block

MEMCPY_BYTES, PAGE_BYTES = 256 << 20, 4096
CODED_AT_ONCE_BYTES = 32 << 20  # of payloads, so that they do not come from the cache
RATIOS = {  # by codec and type of numbers
    ("lossless", "f16"): 1.15, ("lossless", "bf16"): 1.46, ("context", "f16"): 1.19, ("context", "bf16"): 1.52,
    ("int8", "f16"): 1.9, ("int4", "f16"): 3.0,
}  # fmt: skip
SPEEDS = {"lossless": (0.07, 0.12), "context": (0.03, 0.09), "int8": (0.3, 1.0)}  # in, out; of memcpy
LIBRARY = "lossless_library"


@dataclass
class Measured:
    """The figures of one codec and model: bytes, and seconds by turn."""

    put_bytes: int = 0
    stored_bytes: int = 0
    in_s: list[float] = field(default_factory=list)
    out_s: list[float] = field(default_factory=list)
    copy_s: list[float] = field(default_factory=list)


def measure(quick: bool) -> list[Row]:
    wait_for_library()
    source = np.ones(MEMCPY_BYTES, np.uint8)
    target, rounds = np.ones_like(source), 3 if quick else 9
    found: dict[tuple[str, str], list[Measured]] = {key: [] for key in RATIOS}
    library: list[Measured] = []
    for model in MODELS:
        for payloads in computed(model, 128 if quick else 512):
            for name, kind in RATIOS:
                codec = codec_named(name)
                assert codec is not None
                if codec.lacks():
                    progress(f"{name} is left out: {codec.lacks()}")
                    continue
                one = _measured(codec, as_bfloat16(payloads) if kind == "bf16" else payloads, rounds, source, target)
                found[name, kind].append(one)
                if (name, kind) == ("lossless", "f16") and find_spec("openzl") is not None:
                    library.append(_library_alone(payloads, rounds, source, target))
                progress(f"{model} {kind} {name}: {one.put_bytes / one.stored_bytes:.4f}")
    ratios = [_ratio_row(name, kind, each) for (name, kind), each in found.items() if each]
    speeds = [row for name in SPEEDS if found[name, "f16"] for row in _speed_rows(name, found[name, "f16"], name)]
    speeds += _speed_rows(LIBRARY, library, "lossless") if library else []
    return [*ratios, *speeds, *codec_links.measure(quick), *codec_hits.measure(quick), *kvflow.measure(quick)]


def _measured(codec: Codec, given: Payloads, rounds: int, source: Bytes, target: Bytes) -> Measured:
    found, room = Measured(), _side_by_side(1, codec.bound(given.shape.nbytes))[0]
    header, _, _ = kv_block(1, given.shape)
    payloads, stored = list(_side_by_side(len(given.payloads), given.shape.nbytes)), []
    for payload, into in zip(given.payloads, payloads, strict=True):
        into[:] = payload
        length, _ = codec.encode(header, given.shape, into.data, room.data)
        stored.append(room[:length].copy())
        found.put_bytes += payload.nbytes
        found.stored_bytes += length or payload.nbytes
    repeats = -(-CODED_AT_ONCE_BYTES // found.put_bytes)
    back = list(_side_by_side(len(given.payloads), given.shape.nbytes))
    for payload, coded, into in zip(given.payloads, stored, back, strict=True):
        codec.decode(coded.data, into.data)
        assert codec.is_lossy or np.array_equal(into, payload), "a payload did not come back"

    def encode() -> None:
        for payload in payloads * repeats:
            codec.encode(header, given.shape, payload.data, room.data)

    def decode() -> None:
        for coded, into in list(zip(stored, back, strict=True)) * repeats:
            codec.decode(coded.data, into.data)

    _take_turns(found, found.put_bytes * repeats, rounds, encode, decode, lambda: np.copyto(target, source))
    return found


def _library_alone(given: Payloads, rounds: int, source: Bytes, target: Bytes) -> Measured:
    """Measure what the library does for `lossless`, without the rest of the codec."""
    library, found = OpenZL(), Measured()
    layers = [layer for payload in given.payloads for layer in payload.reshape(given.shape.layers, -1)]
    pieces = [layer[each.offset : each.offset + each.nbytes] for layer in layers for each in given.shape.tensors]
    coded = [(library.compress(piece.data, is_bfloat=False), piece.nbytes) for piece in pieces]

    def encode() -> None:
        for piece in pieces:
            library.compress(piece.data, is_bfloat=False)

    def decode() -> None:
        for each, nbytes in coded:
            library.decompress(each, nbytes)

    nbytes = sum(piece.nbytes for piece in pieces)
    _take_turns(found, nbytes, rounds, encode, decode, lambda: np.copyto(target, source))
    return found


def _side_by_side(count: int, nbytes: int) -> Bytes:
    """Return `count` payloads as rows, in memory that begins at a page, as a tier's slots have it."""
    room = np.zeros(count * nbytes + PAGE_BYTES, np.uint8)
    return room[-room.ctypes.data % PAGE_BYTES :][: count * nbytes].reshape(count, nbytes)


def _take_turns(found: Measured, nbytes: int, rounds: int, *actions: Callable[[], object]) -> None:
    """Note the seconds a byte of `actions`: to encode and decode `nbytes`, and the memcpy."""
    for _ in range(rounds):
        for seconds, action in zip((found.in_s, found.out_s, found.copy_s), actions, strict=True):
            seconds.append(_processor_s(action) / (MEMCPY_BYTES if seconds is found.copy_s else nbytes))


def _processor_s(action: Callable[[], object]) -> float:
    """Return the processor time that this process and its children take for `action`."""
    before_s = _used_s()
    action()
    return _used_s() - before_s


def _used_s() -> float:
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    clocks = [~int(child) << 3 | 2 for child in children]  # as clock_getcpuclockid has them
    return time.process_time() + sum(time.clock_gettime(clock) for clock in clocks)


def _ratio_row(name: str, kind: str, models: Sequence[Measured]) -> Row:
    least = min(models, key=lambda each: each.put_bytes / each.stored_bytes)
    row = f"{name}_ratio" if name in ("int8", "int4") else f"{name}_{kind}_ratio"
    return Row(row, least.put_bytes / least.stored_bytes, "x", 1.0, "payload", AT_LEAST, RATIOS[name, kind])


def _speed_rows(row: str, models: Sequence[Measured], codec: str) -> list[Row]:
    rows = []
    for way, target, seconds in zip(("in", "out"), SPEEDS[codec], ("in_s", "out_s"), strict=True):
        slowest = max(models, key=lambda each: min(getattr(each, seconds)) / min(each.copy_s))
        copy, own = min(slowest.copy_s), min(getattr(slowest, seconds))
        rows.append(Row(f"{row}_{way}", 1e-9 / own, "GB/s", 1e-9 / copy, "memcpy 256 MB", AT_LEAST, target))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
