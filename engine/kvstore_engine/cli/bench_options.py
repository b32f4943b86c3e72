"""What the options of `kvengine bench` mean for a load, regardless of what is measured under it.

Owns the sizes of --quick and of the default load.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from kvstore_engine.bench.loads import LoadSettings
from kvstore_engine.gguf import GGUFFile

UNKNOWN_VOCABULARY = 32000
_QUICK = LoadSettings(requests=8, prompt_tokens=64, generate_tokens=16)


def load_settings(options: argparse.Namespace, vocabulary: int) -> LoadSettings:
    """The load's sizes: what was given, else those of --quick or the defaults."""
    base = _QUICK if options.quick else LoadSettings()
    return LoadSettings(
        requests=base.requests if options.requests is None else options.requests,
        prompt_tokens=base.prompt_tokens if options.prompt_tokens is None else options.prompt_tokens,
        generate_tokens=base.generate_tokens if options.generate_tokens is None else options.generate_tokens,
        vocabulary=options.vocabulary or vocabulary,
        seed=options.seed,
    )


def vocabulary_of(path: Path) -> int:
    """How many ids the model knows."""
    with GGUFFile.open(path) as file:
        tokens = file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list | tuple) else UNKNOWN_VOCABULARY


def progress(options: argparse.Namespace) -> Callable[[str], None]:
    """Shows progress, or does not."""
    return (lambda text: None) if options.quiet else (lambda text: print(text, file=sys.stderr, flush=True))
