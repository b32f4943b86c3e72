"""Decode of sequences that share a prefix, with the prefix kept in the L2 cache by a window and without."""

from __future__ import annotations

import numpy as np

from kvstore_engine.kernels.cuda import CacheWindow, Device, KernelRows, PagedAttention
from support.gpu_answers import Answer
from support.gpu_card import Card
from support.gpu_kernels import BF16, speed

LAYERS = 4  # that take turns, so that no launch finds in the cache what the one before it left


def shared_prefix(card: Card, launcher: Device, batch: int = 32, context: int = 4096) -> Answer:
    """Half of each context is shared, in blocks that follow each other. A window is one range: it holds the prefix's
    keys. It only informs: a window that gains nothing is not used."""
    width = context // BF16.block_tokens
    shared = width // 2
    own = np.random.default_rng(0).permutation(batch * (width - shared)).astype(np.int32) + shared
    prefix = np.arange(shared, dtype=np.int32)
    tables = np.concatenate((np.tile(prefix, (batch, 1)), own.reshape(batch, -1)), axis=1)
    chunk = np.full((64, BF16.block_bytes), 0x3C, np.uint8)
    nbytes = (shared + len(own)) * BF16.block_bytes
    layers = [(card.repeated(chunk, nbytes), card.repeated(chunk, nbytes)) for _ in range(LAYERS)]
    attention = PagedAttention(launcher, BF16)
    rows = KernelRows(
        batch, card.place(np.arange(batch, dtype=np.int32)), card.place(np.full(batch, context, np.int32)),
        card.place(np.ascontiguousarray(tables)), width, context,
    )  # fmt: skip
    results = np.zeros((batch, BF16.query_heads, BF16.head_dim), np.uint16)
    queries, output = card.place(results), card.place(results)
    scratch = card.place(np.zeros(attention.scratch_bytes(batch, context), np.uint8))

    def step(is_kept: bool) -> None:
        for planes in layers:
            if is_kept:
                window = CacheWindow.of_blocks(planes[0], BF16.block_bytes, prefix, launcher.window_bytes)
                launcher.keep_in_cache(window, stream=card.stream)
            attention.attend(queries, output, planes, rows, scratch=scratch, stream=card.stream)

    without_s = card.seconds(lambda: step(False), in_graph=False)
    kept = launcher.set_aside_cache(LAYERS * shared * BF16.block_bytes)
    if not kept:
        return Answer(None, "this device sets no part of its L2 cache aside")
    with_s = card.seconds(lambda: step(True), in_graph=False)
    launcher.keep_in_cache(None, stream=card.stream)
    launcher.set_aside_cache(0)
    read_bytes = 2 * LAYERS * batch * width * BF16.block_bytes
    figures = {"by a window": without_s / with_s, "set aside MiB": kept / (1 << 20)}
    says = (
        f"{LAYERS} layers of decode of {batch} x {context}, {context // 2} shared: {without_s / with_s:.2f}x as fast "
        f"with its keys in a window ({speed(figures, 'with', read_bytes, with_s)}; without "
        f"{speed(figures, 'without', read_bytes, without_s)}; {kept >> 20} MiB of the L2 cache set aside)"
    )
    return Answer(True, says, figures)
