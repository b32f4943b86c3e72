"""The questions about kernels, asked of a CUDA device at the sizes of a run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from support.cuda_card import CudaCard
from support.gpu_answers import Answer, Question, Sizes
from support.gpu_beside import decode_beside_transfer
from support.gpu_card import Card
from support.gpu_gather import gather_against_batch
from support.gpu_hot_prefix import shared_prefix
from support.gpu_kernels import crossover, decode_of_a_batch, decode_of_one, errors
from support.gpu_launches import launch_all
from support.gpu_rivals import decode_of_rivals


def _of_card(ask: Callable[[Card, Sizes], Answer], device: int, sizes: Sizes) -> Answer:
    return ask(CudaCard(device, sizes), sizes)


def _launches(card: Card, sizes: Sizes) -> Answer:
    launch_all(card)
    return Answer(True, "every kernel runs, with the results that it should have")


def _hot_prefix(device: int, sizes: Sizes) -> Answer:
    card = CudaCard(device, sizes)
    return shared_prefix(card, card.launcher, sizes.batch, sizes.context)


def _crossover(card: Card, sizes: Sizes) -> Answer:
    batches = tuple(1 << power for power in range((2 * sizes.batch).bit_length()))
    return crossover(card, batches, sizes.context)


def _question(name: str, about: str, limit_s: float, ask: Callable[[Card, Sizes], Answer]) -> Question:
    return Question(name, about, limit_s, partial(_of_card, ask))


KERNEL_QUESTIONS = (
    _question("launches", "every kernel runs, and its results are right", 120, _launches),
    _question("errors", "error against float64, bf16 and int8", 90, lambda card, sizes: errors(card)),
    _question("decode", "paged decode of a batch against a copy; int8 against bf16", 90,
              lambda card, sizes: decode_of_a_batch(card, sizes.batch, sizes.context)),
    _question("decode-one", "paged decode of one long sequence against a copy", 60,
              lambda card, sizes: decode_of_one(card, sizes.long_context)),
    _question("crossover", "one pass against partitions: from which batch on", 90, _crossover),
    _question("decode-rivals", "paged decode against FlashInfer and vLLM, where they are installed", 240,
              lambda card, sizes: decode_of_rivals(card, sizes.batch, sizes.context)),
    _question("beside-transfer", "TPOT beside a saturated transfer", 180,
              lambda card, sizes: decode_beside_transfer(card, sizes.batch, sizes.context, sizes.layers, sizes.steps)),
    _question("gather-batch", "gather kernel against a batch of copies: crossover", 120,
              lambda card, sizes: gather_against_batch(card, sizes.pieces_bytes, sizes.copied_bytes // 4)),
    Question("hot-prefix", "a shared prefix kept in the L2 cache by a window, against none (informs)", 90, _hot_prefix),
)  # fmt: skip
