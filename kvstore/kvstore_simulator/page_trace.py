"""Traces of the pages of K and V that a model's decode selected, token by token. A study of decoding replays them.

A page is the K and V of some consecutive tokens for one K/V head of one layer. Its bounds are what the selection knows
of it without reading it: the least and the greatest K of each channel, as in Quest (Tang and others, ICML 2024). Pages
have numbers within a layer: place in the context * K/V heads + head.

A file is JSON lines, gzip or not. The first one is the head, each further one a step: `pages`, the number of pages of a
layer, and `toggled`, for each layer the pages that are selected now and were not at the step before, or the reverse.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from kvstore_simulator.hit_value import ModelSize, models
from kvstore_simulator.readers import lines_of
from kvstore_simulator.trace import TraceError

FORMAT, VERSION = "pages", 1
SHIPPED = ("smollm2-135m",)
_PAGES_MAX = 1 << 20
_BOUND_BYTES = 2  # bfloat16, as the engine has them
_PAGE_TOKENS_MAX = 1 << 12


@dataclass(frozen=True, slots=True)
class PageStep:
    """One decoded token: the number of pages of a layer, and for each layer the selected ones, ascending."""

    pages: int
    selected: Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class PageTrace:
    """The pages, each of `block_tokens` tokens, that the decode of `model` selected at each of `steps`. `about` says
    what was decoded.
    """

    name: str
    model: ModelSize
    block_tokens: int
    steps: Sequence[PageStep]
    about: str = ""
    format: str = FORMAT
    cut_after: int | None = None

    @property
    def page_bytes(self) -> int:
        """The bytes of K and V of one page."""
        return self.model.kv_bytes_per_token // (self.model.layers * self.model.kv_heads) * self.block_tokens

    @property
    def bound_bytes(self) -> int:
        """The bytes of one page's bounds: of each channel of K two numbers."""
        return 2 * self.model.head_dim * _BOUND_BYTES

    def write(self, path: Path) -> None:
        """Write the trace to the file `path`, packed by gzip. Raises OSError."""
        head = {"format": FORMAT, "version": VERSION, "model": self.model.name, "page_tokens": self.block_tokens}
        lines: list[dict[str, Any]] = [{**head, "about": self.about}]
        before: list[set[int]] = [set()] * self.model.layers
        for step in self.steps:
            now = [set(pages) for pages in step.selected]
            toggled = [sorted(old ^ new) for old, new in zip(before, now, strict=True)]
            lines.append({"pages": step.pages, "toggled": toggled})
            before = now
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read_pages(path: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> PageTrace:
    """Return the page trace in the file `path`, or the one that ships under the name `path`. Raises OSError, and
    TraceError with one line.
    """
    if not path.exists() and str(path) in SHIPPED:
        with resources.as_file(resources.files("kvstore_simulator.profiles").joinpath(f"{path}.pages.gz")) as shipped:
            return read_pages(shipped, progress)
    lines = lines_of(path, progress)
    try:
        head: Any = next(lines, (0, None))[1]
        if (head["format"], head["version"]) != (FORMAT, VERSION):
            raise ValueError
        model, tokens, about = models()[head["model"]], head["page_tokens"], str(head["about"])
        if not 1 <= tokens <= _PAGE_TOKENS_MAX:
            raise ValueError
    except (KeyError, TypeError, ValueError, IndexError):
        raise TraceError(f"{path} does not begin with the head of a page trace, version {VERSION}") from None
    steps: list[PageStep] = []
    before: list[set[int]] = [set()] * model.layers
    for number, line in lines:
        try:
            before = [old ^ set(new) for old, new in zip(before, line["toggled"], strict=True)]
            step = PageStep(line["pages"], [tuple(sorted(pages)) for pages in before])
            if not _is_sound(step, steps[-1].pages if steps else 1):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise TraceError(f"{path}, line {number}: is no step of a page trace") from None
        steps.append(step)
    if not steps:
        raise TraceError(f"{path} has no step")
    return PageTrace(path.name, model, tokens, steps, about)


def _is_sound(step: PageStep, least: int) -> bool:
    """Return whether a step has at least `least` pages, and selects some of them in each layer."""
    known = range(step.pages)
    return least <= step.pages <= _PAGES_MAX and all(
        pages and all(type(page) is int for page in pages) and pages[0] in known and pages[-1] in known
        for pages in step.selected
    )
