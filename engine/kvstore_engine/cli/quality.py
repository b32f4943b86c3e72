"""`kvengine quality`: how much a codec of the store changes a model's answers, in all and by layer."""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_console.table import render_table
from kvstore_engine.devices import CPU, DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.models.locate import locate
from kvstore_engine.quality.measure import (
    BLOCK_TOKENS,
    PREFIX_TOKENS,
    STEP_TOKENS,
    Bytes,
    Comparison,
    Difference,
    Through,
    one_layer,
    windows_of,
)
from kvstore_engine.quality.texts import texts
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer

_POOL_BLOCK_TOKENS = 16
_CHARACTERS_A_TOKEN = 6  # at most, in what is cut from a text
_COLUMNS = ("OF", ">POSITIONS", ">KL (nats)", ">TOP-1 %", ">GREEDY %")


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0."""
    if options.next_tokens < STEP_TOKENS or options.next_tokens % STEP_TOKENS:
        raise UsageError(f"--next-tokens must be a multiple of {STEP_TOKENS}, got {options.next_tokens}")
    given = {path.name: _read(path) for path in options.text}
    path, device = locate(options.model), DeviceName.parse(CPU)
    from kvstore_engine.opening import open_executor

    size = PREFIX_TOKENS + options.next_tokens
    blocks = 2 * -(-(size + options.greedy_tokens) // _POOL_BLOCK_TOKENS)
    file = GGUFFile.open(path)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    setup = PoolSetup(blocks, _POOL_BLOCK_TOKENS, "f16")
    sizes = StepSizes(options.threads or default_threads(), PREFIX_TOKENS, 1, size + options.greedy_tokens)
    with open_executor(file, device, setup, sizes) as executor:
        fingerprint = fingerprint_of(file, executor.config, tokenizer, executor.pool, "quality")
        through = codec_of(options.codec, fingerprint)
        comparison = Comparison(executor, options.next_tokens, options.greedy_tokens)
        found, by_layer = Difference(), {layer: Difference() for layer in _layers(options, executor.config.layers)}
        rows: list[tuple[str, Difference]] = []
        for name, text in (given or texts(size * options.windows * _CHARACTERS_A_TOKEN)).items():
            tokens = tokenizer.encode(text, add_special=False).astype(np.int32)
            windows = windows_of(tokens, options.next_tokens, options.windows)
            if not windows:
                raise UsageError(f"{name} has {len(tokens)} tokens, a window takes {size}: give a longer text")
            of_text = Difference()
            for number, window in enumerate(windows):
                print(f"{name}: window {number + 1} of {len(windows)} ...", file=sys.stderr, flush=True)
                of_text.join(comparison.window(window, through))
            alone = Comparison(executor, options.next_tokens, 0)
            for layer, difference in by_layer.items():
                difference.join(alone.window(windows[0], one_layer(through, layer, executor.config.layers)))
            rows.append((name, of_text))
            found.join(of_text)
    _print(options, rows, found, by_layer)
    return 0


def codec_of(name: str, fingerprint: Any) -> Through:
    """Return what the store's codec makes of a payload of `fingerprint`. Raises UsageError for an unknown name, and for
    a codec that keeps nothing of this model."""
    # By name: an engine runs without the store's packages, and this command measures what they do.
    codecs, native = import_module("kvstore_tiers.codecs"), import_module("kvstore_tiers.codecs.native")
    shapes = import_module("kvstore_tiers.codecs.shapes")
    if name not in codecs.codec_names() or name == codecs.NONE:
        known = ", ".join(each for each in codecs.codec_names() if each != codecs.NONE)
        raise UsageError(f"codec {name!r} is unknown; known: {known}")
    codec = codecs.codec_named(name)
    if lacks := codec.lacks():
        raise UsageError(f"codec {name}: {lacks}")
    native.wait_for_library()
    header = import_module("kvstore_proto.arena").BlockHeader(bytes(16), bytes(16), bytes(32), bytes(16), 0)

    def through(payload: Bytes) -> Bytes:
        shape = shapes.payload_shape(fingerprint, fingerprint.groups[0].group_id, payload.size)
        room, back = np.empty(codec.bound(payload.size), np.uint8), np.empty_like(payload)
        encoded = codec.encode(header, shape, payload.data, room.data)
        if not encoded.nbytes:
            raise UsageError(f"codec {name} has no form for this model's blocks")
        codec.decode(room.data[: encoded.nbytes], back.data)
        return back

    return through


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None


def _layers(options: argparse.Namespace, layers: int) -> range:
    return range(layers if options.by_layer else 0)


def _print(
    options: argparse.Namespace, rows: list[tuple[str, Difference]], found: Difference, by_layer: dict[int, Difference]
) -> None:
    named = [*rows, *((f"layer {layer} alone", each) for layer, each in by_layer.items()), ("all", found)]
    if options.json:
        reports = {name: difference.report() for name, difference in named}
        print(json.dumps({"model": options.model, "codec": options.codec, "block_tokens": BLOCK_TOKENS, **reports}))
        return
    cells = []
    for name, difference in named:
        said = difference.report()
        greedy = f"{said['greedy_percent']:.1f}" if difference.continuations else "-"
        cells.append([name, str(said["positions"]), f"{said['kl']:.6f}", f"{said['top1_percent']:.2f}", greedy])
    print(render_table(_COLUMNS, cells))
