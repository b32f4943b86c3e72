"""Joining by scores matches the definition for any vocabulary: ties, spaces inside tokens, missing characters."""

import itertools
from collections.abc import Mapping

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvstore_engine.tokenizer.sentencepiece import SPACE, SentencePieceEncoder
from kvstore_engine.tokenizer.vocabulary import Vocabulary

_ALPHABET = f"abc{SPACE}\n"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SCORES = st.integers(-3, 0).map(float)  # few values: ties are the rule
_PIECES = st.dictionaries(st.text(_ALPHABET, min_size=1, max_size=5), _SCORES, max_size=30)
_TEXTS = st.text(_ALPHABET + "é", max_size=60)


def _vocabulary(pieces: Mapping[str, float]) -> Vocabulary:
    tokens = [*_BYTES, *pieces]
    return Vocabulary.from_metadata(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.array([0.0] * len(_BYTES) + list(pieces.values()), np.float32),
            "tokenizer.ggml.token_type": np.array([6] * len(_BYTES) + [1] * len(pieces), np.int32),
        }
    )


def _by_definition(pieces: Mapping[str, float], text: str) -> list[str]:
    """Join the best pair, the leftmost of equals, until there is none; what is no token becomes its bytes."""
    symbols = list(text)
    while True:
        pairs = [(pieces.get(left + right), at) for at, (left, right) in enumerate(itertools.pairwise(symbols))]
        scored = [(-score, at) for score, at in pairs if score is not None]
        if not scored:
            break
        at = min(scored)[1]
        symbols[at : at + 2] = ["".join(symbols[at : at + 2])]
    return [
        token
        for symbol in symbols
        for token in ([symbol] if symbol in pieces else [f"<0x{byte:02X}>" for byte in symbol.encode()])
    ]


@given(_PIECES, st.lists(_TEXTS, max_size=4))
def test_the_encoder_joins_as_the_definition_does(pieces: dict[str, float], texts: list[str]) -> None:
    vocabulary = _vocabulary(pieces)
    encode = SentencePieceEncoder(vocabulary)
    for text in [*texts, *texts]:  # the second time from what is remembered
        assert [vocabulary.tokens[token_id] for token_id in encode(text)] == _by_definition(pieces, text)
