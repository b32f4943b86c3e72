"""Paged decode beside others: kernels that are installed here, in the same run, and transfers that fill the bus.

Owns the tensors of a comparison. What is compared with other kernels is a batch of equal contexts, bf16, blocks of 16
tokens; every side is repeated in a CUDA graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from support.gpu_answers import FULL, Answer, known
from support.gpu_kernels import BF16, Card, Decode, speed
from support.report import percentile, warm

REPEATS, ROUNDS = 20, 5
WORKSPACE_BYTES = 128 << 20
RATIO = 1.0  # the least that is promised, against whichever paged kernel is there
TPOT_RATIO = 1.05  # the most that is promised
Queue = Callable[[], object]


def decode_of_rivals(card: Card, batch: int = 32, context: int = 4096, torch_device: str = "cuda") -> Answer:
    """Our kernel in units of each other one's speed. Scaled dot product attention of torch, over K and V that lie
    together, is no paged kernel: its figure only informs."""
    try:
        import torch
    except ImportError:
        return Answer(None, "no rival is here: torch is not installed")
    if torch_device == "cuda" and not torch.cuda.is_available():
        return Answer(None, f"no rival is here: torch {torch.__version__} finds no CUDA device")
    case = Decode.of(card, BF16, batch, context)
    ours_s, figures = case.seconds(), {}
    ours = f"decode of {batch} x {context}, ours {speed(figures, 'ours', case.read_bytes, ours_s)}"
    known(ours, figures)
    state = {"dtype": torch.bfloat16, "device": torch_device}
    pages = batch * context // BF16.block_tokens
    queries = torch.randn(batch, BF16.query_heads, BF16.head_dim, **state)
    planes = [torch.randn(pages, BF16.block_tokens, BF16.kv_heads, BF16.head_dim, **state) for _ in range(2)]
    said, holds = [], []
    for name, prepare in RIVALS.items():
        try:
            queue = prepare(queries, planes, batch, context)
        except ImportError as error:
            said.append(f"{name}: not installed ({error.name or error})")
            continue
        took_s = seconds(torch, queue, torch_device)
        ratio = figures[name] = took_s / ours_s
        if name != TOGETHER:
            holds.append(ratio >= RATIO)
        said.append(f"{name}: {ratio:.2f}x, {speed(figures, name, case.read_bytes, took_s)}")
        known(f"{ours}; {'; '.join(said)}", figures)
    verdict = all(holds) if holds else None
    return Answer(verdict, f"{ours}; as a multiple of theirs (promised {RATIO}): {'; '.join(said)}", figures)


def seconds(torch: Any, queue: Queue, device: str) -> float:
    """Return the seconds of one call, in a graph of many; without one where the device is the host."""
    queue()  # compiles, and warms up
    if device == "cpu":
        began_s = time.perf_counter()
        queue()
        return time.perf_counter() - began_s
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            queue()

    def replayed_s() -> float:
        began_s = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    warm(replayed_s, FULL.warm_s)
    return min(replayed_s() for _ in range(ROUNDS)) / REPEATS


def _table(queries: Any, batch: int, context: int) -> Any:
    import torch

    width = context // BF16.block_tokens
    shuffled = torch.randperm(batch * width, device=queries.device, dtype=torch.int64)
    return shuffled.to(torch.int32).reshape(batch, width)


def _flashinfer(queries: Any, planes: list[Any], batch: int, context: int) -> Queue:
    import flashinfer
    import torch

    integers = {"dtype": torch.int32, "device": queries.device}
    width = context // BF16.block_tokens
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=queries.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, (batch + 1) * width, width, **integers), _table(queries, batch, context).reshape(-1),
        torch.full((batch,), BF16.block_tokens, **integers), BF16.query_heads, BF16.kv_heads, BF16.head_dim,
        BF16.block_tokens, q_data_type=queries.dtype, kv_data_type=queries.dtype,
    )  # fmt: skip
    return lambda: wrapper.run(queries, (planes[0], planes[1]))


def _vllm(queries: Any, planes: list[Any], batch: int, context: int) -> Queue:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    integers = {"dtype": torch.int32, "device": queries.device}
    starts, lengths = torch.arange(batch + 1, **integers), torch.full((batch,), context, **integers)
    table = _table(queries, batch, context)
    return lambda: flash_attn_varlen_func(
        q=queries, k=planes[0], v=planes[1], max_seqlen_q=1, cu_seqlens_q=starts, max_seqlen_k=context,
        seqused_k=lengths, block_table=table, causal=True,
    )  # fmt: skip


def _together(queries: Any, planes: list[Any], batch: int, context: int) -> Queue:
    import torch

    rows = queries.unsqueeze(2)
    keys, values = (plane.view(batch, context, BF16.kv_heads, BF16.head_dim).transpose(1, 2) for plane in planes)
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(rows, keys, values, enable_gqa=True)


TOGETHER = "torch's attention"
RIVALS = {"FlashInfer": _flashinfer, "vLLM's FlashAttention": _vllm, TOGETHER: _together}


def decode_beside_transfer(
    card: Card, batch: int = 32, context: int = 4096, layers: int = 32, steps: int = 300
) -> Answer:
    """Steps alone, then beside copies from a thread of the engine's process (a client's), then from another process
    (the tier's worker); then beside a client's stores, which keep to their budget while it decodes."""
    case = Decode.of(card, BF16, batch, context)
    alone_s = card.steps(case.queue, layers, steps)
    middle_s, high_s = percentile(alone_s, 50), percentile(alone_s, 99)
    said, figures, holds = [], {"alone p50 ms": middle_s * 1e3, "alone p99 ms": high_s * 1e3}, True
    for name, copies in (
        ("a client's copies", lambda: card.saturated(by_process=False)),
        ("the worker's copies", lambda: card.saturated(by_process=True)),
        ("a client's stores within their budget", card.stored),
    ):
        with copies() as reached:
            beside_s = card.steps(case.queue, layers, steps)
            rate = reached()
        middle, high = percentile(beside_s, 50) / middle_s, percentile(beside_s, 99) / high_s
        holds = holds and middle <= TPOT_RATIO
        said.append(f"beside {name} ({rate / 1e9:.1f} GB/s) p50 {middle:.2f}x, p99 {high:.2f}x")
        figures |= {f"{name}, p50": middle, f"{name}, p99": high, f"{name}, GB/s": rate / 1e9}
        figures[f"{name}, p50 ms"] = middle * middle_s * 1e3
        known("; ".join(said), figures, holds=None if holds else False)
    says = (
        f"steps of {layers} layers, {batch} x {context}: alone p50 {middle_s * 1e3:.2f} ms, p99 {high_s * 1e3:.2f}; "
        f"{'; '.join(said)} (promised {TPOT_RATIO})"
    )
    return Answer(holds, says, figures)
