"""Measures the codecs on real K and V: how much smaller they make a block, and how fast, on one core.

The engine computed the payloads from texts of this repository for SmolLM2-135M and Gemma 3 270M
(`support/kv_payloads.py`). A ratio is the bytes of all payloads divided by the bytes that a codec stored for them, with
the frames' heads and tables; the figure is for the model that gains less. Speeds are for whole blocks, encoded and
decoded in turns with one thread's memcpy of 256 MB, the baseline. They are by processor time, of this process and the
one in which a codec works, so other work on the machine changes them little. Each figure is the median of the turns,
for the slower of both models. The rows of `codec_hits.py` and `kvflow.py` follow.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import codec_hits
import kvflow
import numpy as np
from support.kv_payloads import MODELS, Bytes, Payloads, as_bfloat16, computed
from support.report import AT_LEAST, Row, main, median, progress

from kvstore_tiers.codecs import Codec, codec_named
from kvstore_tiers.codecs.native import wait_for_library
from kvstore_tiers.testing.kv_blocks import kv_block

MEMCPY_BYTES = 256 << 20
CODED_AT_ONCE_BYTES = 32 << 20  # of payloads, so that they do not come from the cache
RATIOS = {  # by codec and type of numbers
    ("lossless", "f16"): 1.15, ("lossless", "bf16"): 1.46, ("context", "f16"): 1.19, ("context", "bf16"): 1.52,
    ("int8", "f16"): 1.9, ("int4", "f16"): 3.0,
}  # fmt: skip
SPEEDS = {"lossless": (0.07, 0.12), "context": (0.03, 0.09), "int8": (0.3, 1.0)}  # in, out; of memcpy


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
                progress(f"{model} {kind} {name}: {one.put_bytes / one.stored_bytes:.4f}")
    ratios = [_ratio_row(name, kind, each) for (name, kind), each in found.items() if each]
    speeds = [row for name in SPEEDS if found[name, "f16"] for row in _speed_rows(name, found[name, "f16"])]
    return [*ratios, *speeds, *codec_hits.measure(quick), *kvflow.measure(quick)]


def _measured(codec: Codec, given: Payloads, rounds: int, source: Bytes, target: Bytes) -> Measured:
    found, room = Measured(), np.zeros(codec.bound(given.shape.nbytes), np.uint8)
    header, _, _ = kv_block(1, given.shape)
    stored: list[Bytes] = []
    for payload in given.payloads:
        length, _ = codec.encode(header, given.shape, payload.data, room.data)
        stored.append(room[:length].copy())
        found.put_bytes += payload.nbytes
        found.stored_bytes += length or payload.nbytes
    repeats = -(-CODED_AT_ONCE_BYTES // found.put_bytes)
    back = [np.zeros_like(payload) for payload in given.payloads]
    for payload, coded, into in zip(given.payloads, stored, back, strict=True):
        codec.decode(coded.data, into.data)
        assert codec.is_lossy or np.array_equal(into, payload), "a payload did not come back"

    def encode() -> None:
        for payload in given.payloads * repeats:
            codec.encode(header, given.shape, payload.data, room.data)

    def decode() -> None:
        for coded, into in list(zip(stored, back, strict=True)) * repeats:
            codec.decode(coded.data, into.data)

    nbytes = found.put_bytes * repeats
    for _ in range(rounds):
        found.in_s.append(_processor_s(encode) / nbytes)
        found.copy_s.append(_processor_s(lambda: np.copyto(target, source)) / MEMCPY_BYTES)
        found.out_s.append(_processor_s(decode) / nbytes)
    return found


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


def _speed_rows(name: str, models: Sequence[Measured]) -> list[Row]:
    rows = []
    for way, target, seconds in zip(("in", "out"), SPEEDS[name], ("in_s", "out_s"), strict=True):
        slowest = max(models, key=lambda each: median(getattr(each, seconds)) / median(each.copy_s))
        copy, own = median(slowest.copy_s), median(getattr(slowest, seconds))
        rows.append(Row(f"{name}_{way}", 1e-9 / own, "GB/s", 1e-9 / copy, "memcpy 256 MB", AT_LEAST, target))
    return rows


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
