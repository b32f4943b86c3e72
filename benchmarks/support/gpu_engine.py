"""The questions about decode of our whole engine, asked of a CUDA device where all sides are installed.

What they take is imported when they are asked: a machine that lacks it can ask everything else.
"""

from __future__ import annotations

from functools import partial

from support.gpu_answers import Answer, Question, Sizes

LIMIT_S = 500.0


def _asked_of(subject: str, device: int, sizes: Sizes) -> Answer:
    """`subject`: a name in `decode_models`."""
    try:
        from support import decode_comparison, decode_models
    except ImportError as error:
        return Answer(None, f"not asked: {error.name or error} is not installed")
    model = getattr(decode_models, subject if sizes.whole_models else "SMALL_MODEL")
    return decode_comparison.decode_of_engine(f"cuda:{device}", sizes, model)


ENGINE_DECODE = (
    Question("engine-decode", "decode of our engine, SmolLM2-135M, against generate and torch's attention", LIMIT_S,
             partial(_asked_of, "SMOLLM2_135M")),
    Question("engine-decode-1b", "the same with the shape of a model of 1B", LIMIT_S,
             partial(_asked_of, "ONE_BILLION")),
)  # fmt: skip
