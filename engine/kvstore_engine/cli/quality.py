"""`kvengine quality`: how much a codec of the store changes a model's answers, in all and by layer."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from kvstore_console.table import render_table
from kvstore_engine.devices import CPU, DeviceName
from kvstore_engine.errors import UsageError
from kvstore_engine.executors.base import StepExecutor
from kvstore_engine.executors.sizes import PoolSetup, StepSizes
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.loaded_model import fingerprint_of
from kvstore_engine.models.locate import locate
from kvstore_engine.quality.measure import (
    BLOCK_TOKENS,
    PREFIX_TOKENS,
    STEP_TOKENS,
    Comparison,
    Difference,
    Through,
    Tokens,
    windows_of,
)
from kvstore_engine.quality.stored_form import StoredForm, each_alone, find_profile
from kvstore_engine.quality.texts import texts
from kvstore_engine.threads import default_threads
from kvstore_engine.tokenizer import Tokenizer

_POOL_BLOCK_TOKENS = 16
_CHARACTERS_A_TOKEN = 6  # at most, in what is cut from a text
_COLUMNS = ("OF", ">POSITIONS", ">KL (nats)", ">TOP-1 %", ">GREEDY %", ">RATIO")


def run(options: argparse.Namespace) -> int:
    """Measure and print; return 0."""
    if options.next_tokens < STEP_TOKENS or options.next_tokens % STEP_TOKENS:
        raise UsageError(f"--next-tokens must be a multiple of {STEP_TOKENS}, got {options.next_tokens}")
    if not options.bound > 0:
        raise UsageError(f"--bound must be more than 0 nats, got {options.bound:g}")
    if options.profile and not options.profile.parent.is_dir():
        raise UsageError(f"--profile {options.profile}: there is no directory {options.profile.parent}")
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
        digest = file.weights_digest() if options.profile else "quality"
        form = StoredForm(options.codec, fingerprint_of(file, executor.config, tokenizer, executor.pool, digest))
        grades = form.grades() if options.profile else []
        windows: dict[str, Sequence[Tokens]] = {}
        for name, text in (given or texts(size * options.windows * _CHARACTERS_A_TOKEN)).items():
            tokens = tokenizer.encode(text, add_special=False).astype(np.int32)
            windows[name] = windows_of(tokens, options.next_tokens, options.windows)
            if not windows[name]:
                raise UsageError(f"{name} has {len(tokens)} tokens, a window takes {size}: give a longer text")
        measuring = _Measuring(executor, options, windows)
        _print(options, measuring.rows(form, grades))
    return 0


class _Measuring:
    """The measurements of one command, on the windows of each text. By layer only the first windows count."""

    def __init__(
        self, executor: StepExecutor, options: argparse.Namespace, windows: Mapping[str, Sequence[Tokens]]
    ) -> None:
        self._options, self._windows, self._layers = options, windows, executor.config.layers
        self._whole = Comparison(executor, options.next_tokens, options.greedy_tokens)
        self._alone = Comparison(executor, options.next_tokens, 0)
        self._first = [each[0] for each in windows.values()]

    def rows(self, form: StoredForm, grades: Sequence[str]) -> dict[str, Difference]:
        """Return the figures by name; write the profile that the options ask for, of the codecs `grades`."""
        rows, options = self._of_texts(form.through()), self._options
        total = _sum(rows.values())
        if options.by_layer:
            layers = [{part: options.codec for part in form.parts if part.layer == at} for at in range(self._layers)]
            for layer, found in enumerate(each_alone(self._alone, self._first, form, layers)):
                rows[f"layer {layer} alone"] = found
        if options.profile:
            chosen = find_profile(self._alone, self._first, form, grades, options.bound)
            for part in form.parts:
                grade, found = chosen.get(part, ("exact", Difference()))
                rows[f"layer {part.layer} {part.name}: {grade}"] = found
            graded = {part: grade for part, (grade, _) in chosen.items()}
            form.write_profile(options.profile, graded, options.bound)
            rows["all, by the profile"] = _sum(self._of_texts(form.through(graded)).values())
        return rows | {"all": total}

    def _of_texts(self, through: Through) -> dict[str, Difference]:
        rows = {}
        for name, windows in self._windows.items():
            rows[name] = Difference()
            for number, window in enumerate(windows):
                print(f"{name}: window {number + 1} of {len(windows)} ...", file=sys.stderr, flush=True)
                rows[name].join(self._whole.window(window, [through])[0])
        return rows


def _sum(found: Iterable[Difference]) -> Difference:
    whole = Difference()
    for each in found:
        whole.join(each)
    return whole


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: {error}") from None


def _print(options: argparse.Namespace, rows: Mapping[str, Difference]) -> None:
    if options.json:
        reports = {name: difference.report() for name, difference in rows.items()}
        print(json.dumps({"model": options.model, "codec": options.codec, "block_tokens": BLOCK_TOKENS, **reports}))
        return
    cells = []
    for name, difference in rows.items():
        said = difference.report()
        greedy = f"{said['greedy_percent']:.1f}" if difference.continuations else "-"
        figures = [f"{said['kl']:.6f}", f"{said['top1_percent']:.2f}", greedy, f"{said['ratio']:.3f}"]
        cells.append([name, str(said["positions"]), *figures])
    print(render_table(_COLUMNS, cells))
