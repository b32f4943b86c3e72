"""The questions about kernels, asked of a CUDA device at the sizes of a run."""

from __future__ import annotations

from collections.abc import Callable

from kvstore_cuda import nvrtc
from kvstore_cuda.nvrtc import CompileError
from support.cuda_card import CudaCard
from support.gpu_answers import Answer, Sizes
from support.gpu_beside import decode_beside_transfer
from support.gpu_gather import gather_against_batch
from support.gpu_hot_prefix import shared_prefix
from support.gpu_kernels import crossover, decode_of_a_batch, decode_of_one, errors
from support.gpu_launches import launch_all
from support.gpu_rivals import decode_of_rivals


def of_card(device: int, sizes: Sizes, *, name: str) -> Answer:
    """The question `name`. Unknown where there is no compiler of kernels."""
    try:
        return _ASKED[name](CudaCard(device, sizes), sizes)
    except CompileError:
        try:
            nvrtc.library()
        except CompileError as missing:
            return Answer(None, f"not asked: {missing}")
        raise


def _launches(card: CudaCard, sizes: Sizes) -> Answer:
    launch_all(card)
    return Answer(True, "every kernel runs, with the results that it should have")


def _crossover(card: CudaCard, sizes: Sizes) -> Answer:
    batches = tuple(1 << power for power in range((2 * sizes.batch).bit_length()))
    return crossover(card, batches, sizes.context)


_ASKED: dict[str, Callable[[CudaCard, Sizes], Answer]] = {
    "launches": _launches,
    "errors": lambda card, sizes: errors(card),
    "decode": lambda card, sizes: decode_of_a_batch(card, sizes.batch, sizes.context),
    "decode-one": lambda card, sizes: decode_of_one(card, sizes.long_context),
    "crossover": _crossover,
    "decode-rivals": lambda card, sizes: decode_of_rivals(card, sizes.batch, sizes.context),
    "beside-transfer": lambda card, sizes: decode_beside_transfer(
        card, sizes.batch, sizes.context, sizes.layers, sizes.steps
    ),
    "gather-batch": lambda card, sizes: gather_against_batch(card, sizes.pieces_bytes, sizes.copied_bytes // 4),
    "hot-prefix": lambda card, sizes: shared_prefix(card, card.launcher, sizes.batch, sizes.context),
}
