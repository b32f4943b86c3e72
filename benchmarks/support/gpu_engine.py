"""The questions about decode of our whole engine, asked of a CUDA device where all sides are installed."""

from __future__ import annotations

from support import decode_comparison, decode_models
from support.gpu_answers import Answer, Sizes


def decode(device: int, sizes: Sizes, *, subject: str) -> Answer:
    """`subject`: a name in `decode_models`."""
    model = getattr(decode_models, subject if sizes.whole_models else "SMALL_MODEL")
    return decode_comparison.decode_of_engine(f"cuda:{device}", sizes, model)
