"""Do two prompts ever get one key? Random runs of numbers of every type, in every container, through the one check.

Numbers: ids that fit, ids that are equal once cut to 32 bits, floats, bools, text. Containers: list, tuple, array,
buffer, NumPy's arrays of each type, byte order and stride, torch's tensors where torch is installed. A prompt that is
no run of int32 must be refused; one that is gets the bytes of its own numbers. Also what packing costs.

    python benchmarks/token_containers.py [--json] [--quick]
"""

from __future__ import annotations

import array
import importlib.util
import random
import sys
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from support.report import Row, main

from kvstore_proto.errors import KVStoreError
from kvstore_proto.identity import pack_tokens

PROMPTS, QUICK_PROMPTS = 1_000_000, 20_000
FITTING = (0, 1, 5, 7, 255, 32767, 2**31 - 1)
CUT_ALIKE = (2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63 - 1, 2**64 - 1, -1, -5, -(2**31), -(2**31) - 1, 5 - 2**32)
NO_IDS: tuple[Any, ...] = (
    *(5.9, 5.0, 1e300, float("nan"), True, False, "5", "", None, 5j, b"5", [5]),
    *(np.float32(5), np.True_),
)
KINDS = ("i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
NUMPY_TYPES = [order + kind for kind in KINDS for order in "<>"]
BUFFER_TYPES = "bBhHiIlLqQfd"
TORCH_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")


def numbers(rng: random.Random) -> list[Any]:
    """Return a short run: of few values, so that runs which a cast makes equal are frequent."""
    pool: tuple[Any, ...] = rng.choice((FITTING, FITTING + CUT_ALIKE, FITTING + CUT_ALIKE + NO_IDS))
    return [rng.choice(pool) for _ in range(rng.randint(0, 3))]


def prompts(rng: random.Random) -> Iterator[tuple[Any, tuple[int, ...] | None]]:
    """Yield prompts without end, and the ids of each; None for what is no run of int32."""
    makers: list[Callable[[list[Any]], Any]] = [list, tuple, _objects, _scalars]
    makers += [lambda run, kind=kind: _numpy(run, kind, rng) for kind in NUMPY_TYPES]
    makers += [lambda run, kind=kind: array.array(kind, run) for kind in BUFFER_TYPES]
    makers += [lambda run, kind=kind: memoryview(array.array(kind, run)) for kind in BUFFER_TYPES]
    if importlib.util.find_spec("torch") is not None:
        import torch

        makers += [lambda run, kind=kind: torch.tensor(run, dtype=getattr(torch, kind)) for kind in TORCH_TYPES]
    while True:
        run = numbers(rng)
        try:
            prompt = rng.choice(makers)(run)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            continue  # this container cannot have these
        elements = prompt.tolist() if hasattr(prompt, "tolist") else list(prompt)
        if getattr(prompt, "ndim", 1) == 2 and len(prompt) == 1:  # a batch of one
            elements = elements[0]
        yield prompt, exact(elements)


def exact(elements: list[Any]) -> tuple[int, ...] | None:
    """Return the ids that these elements are; None if one is no int32."""
    for element in elements:
        is_whole = isinstance(element, (int, np.integer)) and not isinstance(element, bool)
        if not is_whole or not -(2**31) <= int(element) < 2**31:
            return None
    return tuple(int(element) for element in elements)


def _objects(run: list[Any]) -> Any:
    made = np.empty(len(run), object)
    made[:] = run
    return made


def _scalars(run: list[Any]) -> Any:
    return [np.array(element)[()] for element in run]


def _numpy(run: list[Any], kind: str, rng: random.Random) -> Any:
    with np.errstate(over="ignore"):
        made = np.array(run, kind)
    return np.repeat(made, 2)[::2] if rng.random() < 0.5 else made


def shared_keys(count: int, seed: int = 1) -> tuple[int, int, int]:
    """Return how many of `count` prompts had the bytes of another prompt, how many others were taken that are no ids,
    and how many were refused although they are."""
    known: dict[bytes, tuple[int, ...]] = {}
    shared = cast = refused = 0
    for _, (prompt, ids) in zip(range(count), prompts(random.Random(seed)), strict=False):
        try:
            packed = pack_tokens(prompt)
        except KVStoreError:
            refused += bool(ids)
            continue
        cast += ids is None
        shared += ids is not None and known.setdefault(packed, ids) != ids
    return shared, cast, refused


def _each_us(work: Callable[[], object], rounds: int) -> float:
    return min(timeit.repeat(work, number=rounds, repeat=5)) / rounds * 1e6


def _speed(tokens: int) -> Iterator[Row]:
    ids, rounds = np.arange(tokens, dtype=np.int32), max(10, 200_000 // tokens)
    for name, given in (("list", ids.tolist()), ("int32", ids), ("int64", ids.astype(np.int64))):
        packed = _each_us(partial(pack_tokens, given), rounds)
        cast = _each_us(partial(_cast, given), rounds)
        yield Row(f"pack {tokens:,} tokens, {name}", packed, "us", cast, "cast unchecked")


def _cast(tokens: Any) -> bytes:
    return np.ascontiguousarray(tokens, dtype="<i4").tobytes()


def measure(quick: bool) -> list[Row]:
    """Return how many prompts went wrong, and what packing takes beside a cast."""
    count = QUICK_PROMPTS if quick else PROMPTS
    wrong = dict(
        zip(("with the key of another", "that are no ids, taken", "of ids, refused"), shared_keys(count), strict=True)
    )
    rows = [Row(f"prompts {name}", many, "", count, "prompts", target=0.0) for name, many in wrong.items()]
    return [*rows, *(row for tokens in (2000, 100_000) for row in _speed(tokens))]


if __name__ == "__main__":
    sys.exit(main(measure, __doc__ or ""))
