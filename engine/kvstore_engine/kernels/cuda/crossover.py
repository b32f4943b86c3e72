"""The number of thread blocks from which on attention is one pass: measured on a device once, and remembered.

KVENGINE_ATTENTION_CROSSOVER in the environment overrides it, in thread blocks for each multiprocessor; 0: always one
pass. The module owns the measurement and the file of its result, beside compiled kernels, one for each kind of device
and program. The caller provides memory and the clock.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstore_cuda.compiler import program_digest
from kvstore_cuda.kernel_cache import cache_folder, keep
from kvstore_cuda.nvrtc import CompileError
from kvstore_engine.errors import UsageError
from kvstore_engine.kernels.cuda.attention import AttentionCrossover, KernelRows, PagedAttention
from kvstore_engine.kernels.cuda.program import ELEMENTS, CudaError

VARIABLE = "KVENGINE_ATTENTION_CROSSOVER"
CONTEXT = 4096  # tokens of each row that is measured
Place = Callable[[npt.NDArray[np.generic]], Any]
Queue = Callable[[int], object]
_log = logging.getLogger(__name__)


def settled(
    attention: PagedAttention, architecture: str, device: str, measure: Callable[[], AttentionCrossover]
) -> AttentionCrossover:
    """Return the crossover, the load from which on attention in one pass is used instead of attention in partitions. An
    environment variable sets it; otherwise an earlier measurement for this `architecture` and `device` is used;
    otherwise the result of `measure`, or the default if measuring fails. Raises UsageError for a wrong value of the
    variable.
    """
    asked = _asked()
    if asked is not None:
        return asked
    try:
        name = f"{program_digest(attention.program, architecture)} {device}"
        target = cache_folder() / f"crossover-{hashlib.blake2b(name.encode(), digest_size=12).hexdigest()}"
        found = _remembered(target)
        if found is None:
            found = measure()
            keep(target, repr(found.blocks_per_multiprocessor).encode())
    except (CompileError, CudaError, RuntimeError) as error:  # as torch's, that memory is short
        _log.info("attention's crossover is the default, it cannot be measured: %s", error)
        return AttentionCrossover()
    _log.info("attention is one pass from %.3g thread blocks a multiprocessor on", found.blocks_per_multiprocessor)
    return found


def measured(attention: PagedAttention, ratios: Mapping[int, float]) -> AttentionCrossover:
    """Return the crossover that `ratios` show, which `pass_ratios` measured: the load with the least number of rows
    from which on one pass is never slower than partitions. If one pass was slower for the largest number, twice that
    number is used.
    """
    rows = least_rows(ratios) or 2 * max(ratios)
    return AttentionCrossover(attention.blocks_per_multiprocessor(rows))


def least_rows(ratios: Mapping[int, float]) -> int | None:
    """Return the least number of rows from which on attention in one pass is never slower than in partitions; None if
    one pass is slower for the largest number. `ratios` has the time of one pass divided by the time of partitions, by
    number of rows.
    """
    least = None
    for rows in sorted(ratios, reverse=True):
        if ratios[rows] > 1:
            break
        least = rows
    return least


def pass_ratios(
    attention: PagedAttention, planes: tuple[Any, Any], place: Place, seconds: Callable[[Queue], float], *,
    blocks: int, rows: Sequence[int], context: int = CONTEXT,
) -> dict[int, float]:  # fmt: skip
    """Measure attention for each number in `rows`, each row in a sequence of its own of `context` tokens. Return by
    number of rows the time of one pass divided by the time of partitions.

    planes: K and V memory of `blocks` blocks, which the measurement reads; any numbers will do. place: copies an array
    into memory of the device. seconds: returns the time of the work that a function queues on a stream. Raises the
    errors of both.
    """
    shape, most = attention.shape, max(rows)
    width = -(-context // shape.block_tokens)
    tables = np.random.default_rng(0).permutation(most * width).astype(np.int32).reshape(most, width) % blocks
    results = np.zeros(most * shape.query_heads * shape.head_dim * ELEMENTS[shape.compute].nbytes, np.uint8)
    queries, output = place(results), place(results)
    scratch = place(np.zeros(attention.scratch_bytes(most, context), np.uint8))
    every = KernelRows(
        most, place(np.arange(most, dtype=np.int32)), place(np.full(most, context, np.int32)),
        place(tables), width, context,
    )  # fmt: skip

    def queue(count: int, version: int, stream: int) -> None:
        described = replace(every, count=count)
        attention.attend(queries, output, planes, described, scratch=scratch, version=version, stream=stream)

    return {count: seconds(partial(queue, count, 1)) / seconds(partial(queue, count, 2)) for count in sorted(rows)}


def _asked() -> AttentionCrossover | None:
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise UsageError(f"{VARIABLE} must be a number of thread blocks a multiprocessor, at least 0, got {text!r}")
    return AttentionCrossover(value)


def _remembered(target: Path) -> AttentionCrossover | None:
    try:
        value = float(target.read_text())
    except (OSError, ValueError):
        return None
    return AttentionCrossover(value) if 0 < value < math.inf else None
