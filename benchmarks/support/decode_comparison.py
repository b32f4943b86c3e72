"""Decode of our whole engine on torch beside Transformers' `generate` and a loop around torch's attention.

Owns the judgement. Sides that compute different models are not compared: each token that a side chose has to be among
the likeliest of Transformers' own forward pass over the same tokens. Equal tokens cannot be asked for: in bf16 the
likeliest two may change places, and from there on two answers differ.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_cuda import nvrtc
from kvstore_engine.errors import OperationError, UsageError
from kvstore_engine.ggml import load_library
from kvstore_engine.gguf import GGUFFile
from kvstore_engine.model.config import ModelConfig
from support import decode_models
from support.decode_models import (
    Decoded,
    Subject,
    Tokens,
    by_attention_of_torch,
    by_generate,
    in_transformers,
    our_engine,
    prompts,
)
from support.gpu_answers import Answer, Sizes, known

OURS, LOOP, DYNAMIC, STATIC = "our engine", "torch's loop", "generate, dynamic cache", "generate, static cache"
MOST_BEHIND = 0.5  # of a row's spread, that a chosen token's logit may be behind the greatest
_COMPILING_S = 220.0  # no static cache is begun after so long: compiling for it may take a minute and a half
_ROWS_AT_ONCE = 8


@dataclass(slots=True)
class Compared:
    """The work of each side with batches: `per_s` and `behind` by (batch, side); `behind` as `MOST_BEHIND`. `equal`:
    the share of tokens that `generate` gives, too. `left_out`: why a setting has no figure.
    """

    per_s: dict[tuple[int, str], float] = field(default_factory=dict)
    behind: dict[tuple[int, str], float] = field(default_factory=dict)
    equal: dict[tuple[int, str], float] = field(default_factory=dict)
    left_out: str = ""


def compared(path: Path, device: str, sizes: Sizes, seconds_left: Callable[[], float]) -> Compared:
    """All sides with the model of `path` on a device by our engine's name of it; one side's weights at a time."""
    import torch

    torch_device = device.removeprefix("torch:")
    found, ours = Compared(), {}
    vocabulary = _vocabulary(path)
    asked = {batch: prompts(batch, sizes.prompt, vocabulary) for batch in sizes.decodes}
    with our_engine(path, device, max(sizes.decodes), sizes.prompt, sizes.decoded) as decode:
        for batch in sizes.decodes:
            ours[batch] = decode(asked[batch])
            _tell({(at, OURS): side.per_s for at, side in ours.items()})
    del decode
    _freed(torch)
    model = in_transformers(path, torch_device)
    for batch, inputs in asked.items():
        generated = by_generate(model, inputs, sizes.decoded)
        sides = {OURS: ours[batch], LOOP: by_attention_of_torch(model, inputs, sizes.decoded), DYNAMIC: generated}
        for name, side in sides.items():
            _note(found, model, inputs, (batch, name), side, generated)
        _tell({(at, OURS): side.per_s for at, side in ours.items()} | found.per_s)
        _freed(torch)
    if torch_device.startswith("cuda"):
        _note_static(found, model, asked, sizes.decoded, seconds_left)
    return found


def verdict(what: str, sizes: Sizes, found: Compared) -> Answer:
    """Ours in units of each rival's speed, `generate` at the better of its settings."""
    figures, said, holds = {}, [], []
    for batch in sizes.decodes:
        ours = found.per_s[batch, OURS]
        generate = max((name for name in (DYNAMIC, STATIC) if (batch, name) in found.per_s),
                       key=lambda name, batch=batch: found.per_s[batch, name])  # fmt: skip
        ratios = [ours / found.per_s[batch, rival] for rival in (generate, LOOP)]
        holds += [ratio > 1.0 for ratio in ratios]
        said.append(f"{batch}: {ours:.0f} tokens/s, {ratios[0]:.2f}x of {generate}, {ratios[1]:.2f}x of {LOOP}")
        figures |= {f"{batch}, generate": ratios[0], f"{batch}, {LOOP}": ratios[1]}
        figures |= {f"{batch}, equal tokens": found.equal[batch, OURS]}
    figures |= {f"{batch}, {name}, tokens/s": per_s for (batch, name), per_s in found.per_s.items()}
    figures["greatest distance"] = max(found.behind.values())
    wrong = [f"{name} at {batch} ({far:.2f})" for (batch, name), far in found.behind.items() if not far <= MOST_BEHIND]
    if wrong:
        reason = f"tokens that no model of these weights chooses, so nothing is compared: {', '.join(wrong)}"
        return Answer(False, f"{what}: {reason}", figures)
    about = f"{what}, {sizes.prompt} + {sizes.decoded} tokens, greedy"
    return Answer(all(holds), "; ".join(filter(None, [about, *said, found.left_out])), figures)


def decode_of_engine(device: str, sizes: Sizes, subject: Subject) -> Answer:
    """`device`: as our engine names it. Unknown where a side is not installed."""
    began_s = time.monotonic()
    try:
        import torch
        import transformers  # noqa: F401  # a side
    except ImportError as error:
        return Answer(None, f"not asked: {error.name} is not installed")
    try:
        load_library()
    except OperationError as error:
        return Answer(None, f"not asked: {error}")
    if device.startswith("cuda") and not torch.cuda.is_available():
        return Answer(None, f"not asked: torch {torch.__version__} finds no CUDA device")
    try:
        with subject.file() as (path, what), _current(torch, device):
            compiling_s = min(_COMPILING_S, sizes.tools_s / 2)
            found = compared(path, device, sizes, lambda: began_s + compiling_s - time.monotonic())
    except (OperationError, UsageError) as error:
        holds = None if device.startswith("cuda") and not _has_compiler() else False
        return Answer(holds, f"{subject.name}: our engine does not run: {error}")
    return verdict(what, sizes, found)


def greatest_distance(model: Any, asked: Tokens, chosen: Tokens) -> float:
    """Return the distance of a chosen token's logit from the greatest, in spreads of its row, where that is most. nan
    where logits are.
    """
    import torch

    found = []
    sequences = torch.from_numpy(np.concatenate([asked, chosen[:, :-1]], 1))
    with torch.inference_mode():
        for first in range(0, len(asked), _ROWS_AT_ONCE):
            rows = slice(first, first + _ROWS_AT_ONCE)
            inputs = sequences[rows].to(model.device)
            logits = model(inputs, logits_to_keep=chosen.shape[1], use_cache=False).logits.float()
            taken = logits.gather(-1, torch.from_numpy(chosen[rows]).to(model.device)[..., None])[..., 0]
            found.append(((logits.amax(-1) - taken) / logits.std(-1)).max().item())
    return float(np.max(found))


def _note(found: Compared, model: Any, asked: Tokens, at: tuple[int, str], side: Decoded, generated: Decoded) -> None:
    found.per_s[at] = side.per_s
    found.behind[at] = greatest_distance(model, asked, side.tokens)
    found.equal[at] = float((side.tokens == generated.tokens).mean())


def _note_static(
    found: Compared, model: Any, asked: Mapping[int, Tokens], steps: int, seconds_left: Callable[[], float]
) -> None:
    """`generate` with the cache that it compiles the model for, where there is time for that."""
    for batch, inputs in asked.items():
        if seconds_left() <= 0:
            found.left_out = f"no time to compile for a static cache from {batch} on"
            return
        try:
            by_generate(model, inputs, steps, cache="static")  # compiles
            side = by_generate(model, inputs, steps, cache="static")
        except Exception as error:  # the compiler's errors are of many kinds, and the dynamic cache has its figure
            found.left_out = f"no figure for a static cache: {type(error).__name__}: {str(error).splitlines()[:1]}"
            return
        _note(found, model, inputs, (batch, STATIC), side, side)
        _tell(found.per_s)


def _tell(per_s: Mapping[tuple[int, str], float]) -> None:
    """Report what has been measured so far."""
    figures = {f"{batch}, {name}, tokens/s": each for (batch, name), each in sorted(per_s.items())}
    known(
        "; ".join(f"{name.removesuffix(', tokens/s')} {each:.0f} tokens/s" for name, each in figures.items()), figures
    )


def _has_compiler() -> bool:
    try:
        nvrtc.library()
    except nvrtc.CompileError:
        return False
    return True


def _current(torch: Any, device: str) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.startswith("cuda") else contextlib.nullcontext()


def _vocabulary(path: Path) -> int:
    with GGUFFile.open(path) as file:
        return ModelConfig.from_gguf(file).vocabulary


def _freed(torch: Any) -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def decode(device: int, sizes: Sizes, *, subject: str) -> Answer:
    """`subject`: a name in `decode_models`."""
    model = getattr(decode_models, subject if sizes.whole_models else "SMALL_MODEL")
    return decode_of_engine(f"cuda:{device}", sizes, model)
