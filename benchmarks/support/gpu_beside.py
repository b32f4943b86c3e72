"""Decode beside a transfer that fills the bus: how much longer a step of 32 layers takes than alone."""

from __future__ import annotations

from support.gpu_answers import Answer, known
from support.gpu_card import Card
from support.gpu_kernels import BF16, Decode
from support.timing import percentile

TPOT_RATIO = 1.05  # the most that is promised


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
